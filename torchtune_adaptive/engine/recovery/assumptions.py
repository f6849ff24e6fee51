"""What a dry run assumes of a model, and whether it still holds."""

import itertools

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel


class Assumptions:
    """What a dry run of ``model`` has seen, as it was before; its modules as they were at the last ``see_modules``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
        self._batch_norms = [(one, one.training) for one in model.modules() if isinstance(one, _BatchNorm)]
        self._comm_hooks = model._comm_hooks if isinstance(model, DistributedDataParallel) else []
        self.see_modules()

    def see_modules(self) -> None:
        """See the modules as they are now: a micro-step may have added some."""
        self._modules = _with_tensors(self._model)
        every = list(self._model.modules())
        self._children = [one._modules for one in every if isinstance(one._modules, dict)]  # not of scripted ones
        self._all_children = self._present_children()
        self._buffers = [one._buffers for one in every]
        self._num_buffers = list(map(len, self._buffers))

    def broken(self) -> str:
        """Which assumption no longer holds on this rank, as part of a sentence, or ""."""
        if self._present_children() != self._all_children and _with_tensors(self._model) != self._modules:
            return "modules were added or removed"  # the dry run has not seen their buffers
        if list(map(len, self._buffers)) != self._num_buffers:
            return "buffers were added or removed"
        if any(parameter.requires_grad is not was for parameter, was in self._is_trained.items()):
            return "parameters were frozen or unfrozen"  # other collectives reduce gradients
        if any(module.training is not was for module, was in self._batch_norms):
            return "a batch norm has changed its mode"  # samples may be mixed
        if self._comm_hooks:
            return "a communication hook was registered"  # which the next dry run refuses, as the last would have
        return ""

    def has_gradients(self) -> bool:
        """Whether a parameter that was trained has a gradient."""
        return any(is_trained and parameter.grad is not None for parameter, is_trained in self._is_trained.items())

    def _present_children(self) -> list[nn.Module | None]:
        return list(itertools.chain.from_iterable(map(dict.values, self._children)))


def _with_tensors(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that have parameters or buffers of their own."""
    own = ((one, (*one._parameters.values(), *one._buffers.values())) for one in model.modules())
    return [one for one, tensors in own if any(tensor is not None for tensor in tensors)]

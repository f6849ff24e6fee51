"""All tensors that training changes, by names that do not depend on wrappers or sharding."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtune_adaptive.engine.memory.operations import local_part
from torchtune_adaptive.text import count_text

# By activation checkpointing and compilation.
_WRAPPERS = re.compile(r"(\.|^)(_checkpoint_wrapped_module|_orig_mod)(?=\.|$)")


class TrainedTensors:
    """Trained parameters and persistent buffers of ``model``, and the state of its optimizers.

    Names are ``model/PARAMETER`` and ``optimizer/PARAMETER/KEY``. Frozen parameters are left out. An optimizer tensor
    that is not sharded with its parameter, and is not a single number, is saved for each rank:
    ``optimizer/PARAMETER/KEY/RANK``. A wrapper tensor, such as torchao's 8-bit state, is saved part by part:
    ``KEY.PART``.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, rank: int, ranks: int) -> None:
        self._optimizers = tuple(optimizers)
        self._rank = rank
        self._ranks = ranks
        self._parameters = {
            without_wrappers(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._buffers = dict(_persistent_buffers(model))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The current tensors, without copies."""
        named = {f"model/{name}": tensor.detach() for name, tensor in (self._parameters | self._buffers).items()}
        for name, parameter, state in self._states():
            for key, value in _parts(state):
                named[self._saved_name(name, key, parameter, value)] = value
        return named

    def options(self) -> dict[str, Any]:
        """The optimizers' options of groups and numbers per parameter, as JSON values."""
        return {
            "groups": [
                [{key: _plain(value) for key, value in group.items() if key != "params"} for group in one.param_groups]
                for one in self._optimizers
            ],
            "numbers": {
                f"{name}/{key}": value
                for name, _, state in self._states()
                for key, value in state.items()
                if not isinstance(value, torch.Tensor)
            },
        }

    def unsavable(self) -> str:
        """Which optimizer state a checkpoint cannot hold, as part of a sentence; "" if it can hold all."""
        for _, _, state in self._states():
            numbers = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
            for key, value in [*_parts(state), *numbers.items()]:
                inner = local_part(value)
                if type(inner) is not torch.Tensor and not isinstance(inner, int | float | str | None):
                    return f"the optimizer's {key} is a {type(inner).__name__}, neither a plain tensor nor a number"
        return ""

    def missing(self, saved: Mapping[str, Any]) -> str:
        """How the saved tensors differ from this model's, as part of a sentence; "" if they match.

        Args:
            saved: DCP's description of each saved tensor.
        """
        mine = {f"model/{name}": tuple(tensor.shape) for name, tensor in (self._parameters | self._buffers).items()}
        theirs = {name: tuple(one.size) for name, one in saved.items() if name.startswith("model/")}
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                was, now = _describe(theirs.get(name)), _describe(mine.get(name))
                return f"{name.removeprefix('model/')} was {was} and is {now}"
        ranks = {parts[3] for parts in (name.split("/") for name in saved) if len(parts) == 4}
        return (
            f"the optimizer's state is of {count_text(len(ranks), 'rank')}"
            if len(ranks) not in (0, self._ranks)
            else ""
        )

    def allocate(self, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """As ``tensors``, with new optimizer state of the saved shapes, to be filled. Existing state is dropped.

        An optimizer that is not one of torch's creates its own state, by a step without gradients, because the state
        may be in paged memory or wrap other tensors. Parameters that this step changes must be filled too. State of a
        parameter's type has the type that the parameter has now: the config's `dtype` may have changed.
        """
        by_parameter: dict[str, list[tuple[str, TensorStorageMetadata]]] = {}
        for saved_name, one in saved.items():
            kind, name, *keys = saved_name.split("/")
            if kind == "optimizer" and keys[1:] in ([], [str(self._rank)]):
                by_parameter.setdefault(name, []).append((keys[0], one))
        for optimizer in self._optimizers:
            if not type(optimizer).__module__.startswith("torch.optim."):
                optimizer.state.clear()
                _init_optim_state(optimizer)
        for optimizer, group, parameter in self._trained():
            made, state = optimizer.state.get(parameter, {}), {}
            name = self._names[parameter]
            saved_type = saved[f"model/{name}"].properties.dtype
            for saved_key, one in by_parameter.get(name, []):
                key, _, part = saved_key.partition(".")
                own, dtype = made.get(key), one.properties.dtype
                if dtype == saved_type and one.size == parameter.shape != ():
                    dtype = parameter.dtype
                is_made = isinstance(own, torch.Tensor) and (own.shape, own.dtype) == (one.size, dtype)
                state[key] = own if part or is_made else _alike(one.size, dtype, parameter, key=key, group=group)
            optimizer.state[parameter] = state
        return self.tensors()

    def load_options(self, options: Mapping[str, Any], *, chosen: Sequence[str]) -> None:
        """Load the values from ``options``, except those that the config has ``chosen`` differently."""
        for optimizer, groups in zip(self._optimizers, options["groups"], strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                for key, value in saved.items():
                    if key.removeprefix("initial_") not in chosen:
                        _set_option(group, key, value)
        for optimizer, _, parameter in self._trained():
            prefix = f"{self._names[parameter]}/"
            numbers = {key.removeprefix(prefix): v for key, v in options["numbers"].items() if key.startswith(prefix)}
            optimizer.state[parameter].update(numbers)
            if not optimizer.state[parameter]:
                del optimizer.state[parameter]  # as in an optimizer without state

    def reset_options(self, chosen: Sequence[str], *, before: Mapping[str, Any]) -> None:
        """Set the options that the config has ``chosen`` to its values, with which the optimizers were created.

        A group keeps an option of its own, such as no weight decay for norms. The rate of all groups is the config's.

        Args:
            before: options in the config of the checkpoint.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for key in group:
                    name = key.removeprefix("initial_")
                    is_own = name != "lr" and name in before and _plain(group[key]) != before[name]
                    if name in chosen and name in optimizer.defaults and not is_own:
                        _set_option(group, key, optimizer.defaults[name])

    def _trained(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], nn.Parameter]]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in self._names:
                        yield optimizer, group, parameter

    def _states(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        for optimizer, _, parameter in self._trained():
            if parameter in optimizer.state:
                yield self._names[parameter], parameter, optimizer.state[parameter]

    def _saved_name(self, name: str, key: str, parameter: nn.Parameter, value: torch.Tensor) -> str:
        is_own = isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.dim() > 0
        return f"optimizer/{name}/{key}" + (f"/{self._rank}" if is_own else "")


def without_wrappers(name: str) -> str:
    """A parameter's or module's name in the model without wrappers.

    >>> without_wrappers("layers.0._checkpoint_wrapped_module"), without_wrappers("_orig_mod.layers.0.attn.weight")
    ('layers.0', 'layers.0.attn.weight')
    """
    return _WRAPPERS.sub("", name).removeprefix(".")


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield without_wrappers(name), buffer


def _parts(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a parameter's state. A wrapper tensor is replaced by its parts."""
    for key, value in state.items():
        inner = local_part(value)
        if is_traceable_wrapper_subclass(inner):
            names, _ = inner.__tensor_flatten__()
            yield from ((f"{key}.{name}", getattr(inner, name)) for name in names)
        elif isinstance(value, torch.Tensor):
            yield key, value


def _alike(
    size: torch.Size, dtype: torch.dtype, parameter: nn.Parameter, *, key: str, group: Mapping[str, Any]
) -> torch.Tensor:
    """An empty tensor for a saved one, on the device where the optimizer of ``parameter`` keeps it."""
    if size == parameter.shape != ():
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # torch's optimizers keep the step count in host memory, unless their kernels read it on the device.
    on_host = key == "step" and not group.get("fused") and not group.get("capturable")
    return torch.empty(size, dtype=dtype, device="cpu" if on_host else parameter.device)


def _describe(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else str(list(shape))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else list(value) if isinstance(value, tuple) else value


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

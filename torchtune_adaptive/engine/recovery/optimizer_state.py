"""Check optimizers, and create their state before training, so that the first step needs no more than later ones."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from torchtune_adaptive.engine.memory.operations import plain_parts
from torchtune_adaptive.engine.optimizers import optimizers_within, without_step_hooks
from torchtune_adaptive.errors import InputError

_WITH_STATES = torch.optim.Adam, torch.optim.AdamW  # not their subclasses, which may behave differently


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Check that ``model`` has every parameter that an optimizer trains: gradients of others could not be dropped.

    An optimizer within another one may have parameters of its own, but none that the model has since replaced.

    Raises:
        InputError: the model lacks a parameter, or has lazy ones; or an optimizer has no ``state``.
    """
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(one):
            raise InputError(f"`{name}` of a lazy module has no shape before the first forward pass: run one first.")
    for optimizer in optimizers:
        if not hasattr(optimizer, "state"):
            raise InputError(
                f"`{type(optimizer).__name__}` has no `state` and hooks, because it does not call"
                " `torch.optim.Optimizer.__init__`: use another optimizer."
            )
    of_model = {id(parameter) for parameter in model.parameters()}
    trained = {id(parameter) for parameter in _trained_by(optimizers_within(optimizers))}
    untrained = [one for one in model.parameters() if one.requires_grad and id(one) not in trained]
    own = {id(parameter) for parameter in _trained_by(optimizers)}
    for parameter in _trained_by(optimizers_within(optimizers)):
        if id(parameter) in of_model:
            continue
        replacement = next((one for one in untrained if one.shape == parameter.shape), None)
        if replacement is not None or id(parameter) in own:  # those within may have copies of their own
            raise InputError(
                f"`model` lacks a parameter of shape {tuple(parameter.shape)} that `optimizer` trains:"
                f" {_way_out(parameter, replacement)}."
            )


def _trained_by(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.requires_grad)


def _way_out(missing: torch.Tensor, replacement: nn.Parameter | None) -> str:
    """What to do if a model lacks a parameter, for a message. ``replacement``: what no optimizer trains."""
    if replacement is None:
        return "pass several models in an `nn.ModuleList`"
    is_sharded = isinstance(replacement, DTensor) and not isinstance(missing, DTensor)
    replaces = "`fully_shard`, `parallelize_module`" if is_sharded else "`to_empty`, `load_state_dict(assign=True)`"
    return f"create the optimizer after what replaces parameters ({replaces})"


def allocate_state(optimizer: torch.optim.Optimizer) -> bool:
    """Create the initial state of ``optimizer`` by a step on zero gradients. Gradients are None afterwards.

    Only for ``torch.optim.Adam`` and ``AdamW`` without state. Their state starts as zeros, so that training stays equal
    bit for bit; other optimizers may detect their first step by missing state. Parameters do not change, and hooks of
    steps do not run. Returns whether the state was created: then ``drop_unused_states`` removes what training will not
    use. Not a collective, unless the optimizer's step is one.

    Raises:
        torch.OutOfMemoryError: the state does not fit; the part that was created is removed again.
    """
    if type(optimizer) not in _WITH_STATES or optimizer.state:
        return False
    groups = optimizer.param_groups
    trained = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
    if not all(_divides(group["eps"], parameter.dtype) for group in groups for parameter in group["params"]):
        return False
    rates = [group["lr"] for group in groups]
    stepped = vars(optimizer).get("_opt_called")
    try:
        for group in groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        with without_step_hooks([optimizer]):
            optimizer.step()
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
    except BaseException:
        optimizer.state.clear()
        raise
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for parameter in trained:
            parameter.grad = None
        if stepped is None:
            vars(optimizer).pop("_opt_called", None)
    return True


def drop_unused_states(optimizers: Sequence[torch.optim.Optimizer], used: Iterable[torch.Tensor]) -> None:
    """Remove the states that ``allocate_state`` has created for parameters other than ``used``, which get gradients.

    A step would not have created them. They are recognised by zeros in all tensors, also in the number of steps. If
    such a parameter gets a gradient later, its state is created in that step.
    """
    kept = {id(parameter) for parameter in used}
    for optimizer in optimizers:
        unused = [one for one in optimizer.state if id(one) not in kept] if type(optimizer) in _WITH_STATES else []
        for parameter in unused:
            parts = [part for value in optimizer.state[parameter].values() for part in plain_parts(value)]
            if not any(part.any() for part in parts):  # each part alone: of a whole DTensor it would be a collective
                del optimizer.state[parameter]


def _divides(eps: float, dtype: torch.dtype) -> bool:
    """Whether zero divided by ``eps`` is zero. It is not if ``eps`` is zero, or rounds to zero in its type."""
    return (torch.zeros((), dtype=dtype) / torch.tensor(eps, dtype=dtype)).item() == 0

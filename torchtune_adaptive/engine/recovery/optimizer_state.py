"""Create an optimizer's state before training, so that the first step needs no more memory than later ones."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from torchtune_adaptive.errors import InputError


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Check that ``model`` has every parameter that an optimizer trains: others could not be restored.

    Raises:
        InputError: it lacks one.
    """
    of_model = {id(parameter) for parameter in model.parameters()}
    for parameter in (one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]):
        if parameter.requires_grad and id(parameter) not in of_model:
            raise InputError(
                "`model` must have all parameters that `optimizer` trains, but lacks one of shape"
                f" {tuple(parameter.shape)}: pass several models in an `nn.ModuleList`."
            )


def allocate_state(optimizer: torch.optim.Optimizer) -> bool:
    """Create the initial state of ``optimizer`` by a step on zero gradients. Gradients are None afterwards.

    Only for ``torch.optim.Adam`` and ``AdamW`` without state. Their state starts as zeros, so that training stays equal
    bit for bit; other optimizers may detect their first step by missing state. Parameters do not change, and hooks that
    a user has registered to run after a step do not run. Returns whether the state was created. Not a collective,
    unless the optimizer's step is one.
    Raises:
        torch.OutOfMemoryError: the state does not fit; the part that was created is removed again.
    """
    groups = optimizer.param_groups
    trained = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
    if optimizer.state or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    if not all(_divides(group["eps"], parameter.dtype) for group in groups for parameter in group["params"]):
        return False
    rates = [group["lr"] for group in groups]
    stepped = vars(optimizer).get("_opt_called")
    hooks, optimizer._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks, OrderedDict()
    try:
        for group in groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
    except BaseException:
        optimizer.state.clear()
        raise
    finally:
        optimizer._optimizer_step_post_hooks = hooks
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for parameter in trained:
            parameter.grad = None
        if stepped is None:
            vars(optimizer).pop("_opt_called", None)
    return True


def _divides(eps: float, dtype: torch.dtype) -> bool:
    """Whether zero divided by ``eps`` is zero. It is not if ``eps`` is zero, or rounds to zero in its type."""
    return (torch.zeros((), dtype=dtype) / torch.tensor(eps, dtype=dtype)).item() == 0

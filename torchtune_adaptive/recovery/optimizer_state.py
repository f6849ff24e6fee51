"""Make an optimizer's state before training, so that the first real step needs no more memory than any other."""

import torch


def allocate_state(optimizer: torch.optim.Optimizer) -> bool:
    """Give ``optimizer`` the state of before its first step, by a step on gradients of zero; gradients are then None.

    Only for ``torch.optim.Adam`` and ``AdamW`` that have no state yet: theirs begins as zeros, so that training
    is the same to the bit; another kind may tell a first step by its missing state. Parameters do not change.
    Returns whether it did. Not a collective, unless the optimizer's step is one.

    Raises:
        torch.OutOfMemoryError: there is no memory for the state; what was made of it is gone again.
    """
    groups = optimizer.param_groups
    trained = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
    if optimizer.state or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    if not all(_divides(group["eps"], parameter.dtype) for group in groups for parameter in group["params"]):
        return False
    rates = [group["lr"] for group in groups]
    stepped = vars(optimizer).get("_opt_called")
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
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for parameter in trained:
            parameter.grad = None
        if stepped is None:
            vars(optimizer).pop("_opt_called", None)
    return True


def _divides(eps: float, dtype: torch.dtype) -> bool:
    """Whether zero divided by ``eps`` is zero; not if ``eps`` is zero itself, or too small for its type."""
    return (torch.zeros((), dtype=dtype) / torch.tensor(eps, dtype=dtype)).item() == 0

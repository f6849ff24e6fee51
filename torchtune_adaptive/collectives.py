"""Which operations that come by a dispatch mode are collectives, and how many there are."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.wrappers import is_on_wrappers

_NAMESPACES = ("c10d", "_c10d_functional")


def is_collective(func: Any) -> bool:
    """Whether the operation ``func`` issues a collective, or waits for one."""
    return func.namespace in _NAMESPACES


def is_wait(func: Any) -> bool:
    """Whether the collective operation ``func`` only waits for one that was issued before."""
    return "wait" in func.__name__


class CountCollectives(TorchDispatchMode):
    """Counts the collectives that this rank issues, by whatever code."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.issued = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_on_wrappers(types):
            return NotImplemented
        self.issued += is_collective(func) and not is_wait(func)
        return func(*args, **(kwargs or {}))

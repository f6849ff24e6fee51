"""Which operations that come by a dispatch mode are collectives."""

from typing import Any

_NAMESPACES = ("c10d", "_c10d_functional")


def is_collective(func: Any) -> bool:
    """Whether the operation ``func`` issues a collective, or waits for one."""
    return func.namespace in _NAMESPACES


def is_wait(func: Any) -> bool:
    """Whether the collective operation ``func`` only waits for one that was issued before."""
    return "wait" in func.__name__

"""Collectives that a model issues itself, as tensor parallelism does: torch's functional collectives.

Their sizes depend on the batch. Their results are waited for when they are first used; until then, torch keeps them in
a registry.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, _redistribute

from torchtune_adaptive.engine.memory.operations import OperationMode, is_collective, is_wait


class CannotRecordError(ValueError):
    """A model's collectives cannot be recorded; the message says why."""


class FunctionalCollective(NamedTuple):
    """One functional collective ``func(tensor, *rest)``; ``numel`` counts the elements of the tensor."""

    func: Any
    numel: int
    dtype: torch.dtype
    rest: tuple[Any, ...]

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...]) -> "FunctionalCollective | None":
        """The call as a collective, which ``replay`` can issue; None if it is another operation."""
        is_functional = func.namespace == "_c10d_functional" and is_collective(func) and not is_wait(func)
        if not is_functional or not isinstance(args[0], torch.Tensor):
            return None
        return cls(func, args[0].numel(), args[0].dtype, args[1:])

    @property
    def kind(self) -> str:
        """The name of the operation."""
        return str(self.func)

    @property
    def group(self) -> str:
        """The name of its group, which differs between groups of equal purpose."""
        return self.rest[-1]

    def description(self) -> str:
        """Describe what must be equal on every rank. The group itself is not included."""
        return f"{self.kind} of {self.numel} {self.dtype} with {self.rest[:-1]}"

    def replay(self, device: torch.device) -> None:
        """Issue it with zeros, and wait for the result."""
        zeros = torch.zeros(self.numel, dtype=self.dtype, device=device)
        torch.ops._c10d_functional.wait_tensor(self.func(zeros, *self.rest))


def groups_of(collectives: Iterable[Any]) -> list[str]:
    """The group of each functional collective in ``collectives``, in order."""
    return [one.group for one in collectives if isinstance(one, FunctionalCollective)]


class RecordFunctional(OperationMode):
    """Counts in ``issued`` the collectives of any code on this rank, and calls ``record`` with each functional one."""

    def __init__(self, record: Callable[[FunctionalCollective], object]) -> None:
        super().__init__()
        self.issued = 0
        self._record = record

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self.issued += is_collective(func) and not is_wait(func)
        if (collective := FunctionalCollective.of(func, args)) is not None:
            self._record(collective)
        return result


class DryRecordFunctional(OperationMode):
    """Calls ``note`` with each functional collective instead of issuing it. The results are zeros."""

    def __init__(self, note: Callable[[FunctionalCollective], object]) -> None:
        super().__init__()
        self._note = note

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_collective(func):
            return func(*args, **kwargs)
        if is_wait(func):
            return args[0]
        collective = FunctionalCollective.of(func, args)
        if collective is None:
            raise CannotRecordError(f"{func} is not known")
        self._note(collective)
        shape = func(torch.empty_like(args[0], device="meta"), *args[1:])
        return torch.zeros_like(shape, device=args[0].device)


class IssuedCounts:
    """How many collectives each of ``groups`` has issued since ``start``, by the numbers that torch gives them.

    Args:
        groups: process groups, or their names; one may be there more than once.
    """

    def __init__(self, groups: Iterable[Any] = ()) -> None:
        resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
        self._groups = {one: resolve(one) if isinstance(one, str) else one for one in groups}
        self._first: Counter[Any] = Counter()

    def __bool__(self) -> bool:
        """Whether there are groups to count for."""
        return bool(self._groups)

    def start(self) -> None:
        """Count from now on."""
        self._first = self._numbers()

    def since_start(self) -> Counter[Any]:
        """The counts; groups without collectives are left out."""
        return self._numbers() - self._first

    def _numbers(self) -> Counter[Any]:
        return Counter({one: _number_of_collectives(group) for one, group in self._groups.items()})


def _number_of_collectives(group: Any) -> int:
    """How many collectives there have been in ``group``; always 0 for a backend that does not count them."""
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:  # as of a backend of another maker
        return 0


def wait_for_unused_results() -> None:
    """Wait for the functional collectives whose results nobody has used, because an error came first.

    Otherwise torch's registry keeps their memory for good. Call it while the error still keeps the results alive. All
    ranks must issue these collectives.
    """
    if not cast(Any, torch._C)._distributed_c10d._get_work_registry_size():
        return
    for one in gc.get_objects():
        if issubclass(type(one), AsyncCollectiveTensor):
            one = one.elem
        if type(one) is torch.Tensor:  # others do nothing here
            torch.ops._c10d_functional.wait_tensor(one)


def drop_unfinished_masks() -> None:
    """Drop the masks that an error has left: a sharded embedding masks its rows until they are summed over ranks.

    DTensor caches the mask with the operation's sharding, and refuses another one there. Dropped shardings are derived
    again. Cached redistributions are dropped too: those of torch 2.9 keep the old shardings, whose masks are gone.
    """
    # torch's own function is in a module that needs numpy, and torch 2.9 and 2.10 do not have it.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    clear_fast_path = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # of torch 2.10 and later
    if clear_fast_path is not None:
        clear_fast_path()
    vars(_redistribute)["_gen_transform_infos"].cache_clear()

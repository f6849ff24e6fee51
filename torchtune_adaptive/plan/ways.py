"""How a run that does not fit may fit: which changes to plan, in which order. It needs torch alone."""

from collections.abc import Callable, Iterable, Iterator

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.decide import Plan, PlannedChange

_MOST_RANKS = 512
_SHORTEST_ROWS = 512
_SHARDED = ("parameters", "frozen models", "gradients", "optimizer state", "temporaries")  # the last of the optimizer


def planned_change(name: str, plan: Callable[[], Plan]) -> PlannedChange:
    """A change with the plan of the longest rows after it, or with the reason why ``plan`` refuses it."""
    try:
        return PlannedChange(name, plan().decisive)
    except InputError as error:
        return PlannedChange(name, None, str(error))


def first_that_fits(changes: Iterable[PlannedChange]) -> Iterator[PlannedChange]:
    """The first of the changes that fits or cannot be planned, or else the last one, if any."""
    last = None
    for last in changes:
        if last.fits or last.refused:
            break
    if last is not None:
        yield last


def enough_ranks(planned: Plan, *, is_sharded: bool = True) -> Iterator[int]:
    """Twice as many ranks, four times as many and so on, from the first that could be enough.

    More ranks shorten what is sharded, but not what one row needs on every rank. If each rank has a copy until now, as
    many ranks as there are come first, and buckets for gradients go.
    """
    one_row = planned.size(1)
    kinds = _SHARDED if is_sharded else (*_SHARDED, "other tensors")
    sharded_bytes = sum(num_bytes for kind, num_bytes in one_row.kinds.items() if kind in kinds)
    shards = planned.world_size if is_sharded else 1
    ranks = max(2 * shards, planned.world_size)
    while ranks <= _MOST_RANKS:
        saved_bytes = sharded_bytes * (1 - shards / ranks)
        saved_bytes *= one_row.reserved_bytes / one_row.allocated_bytes
        if one_row.process_bytes - saved_bytes <= planned.device.usable_bytes:
            yield ranks
        ranks *= 2


def shorter_rows(planned: Plan, seq_len: int) -> Iterator[int]:
    """Lengths of rows to try, longest first: a half of ``seq_len``, a quarter and so on.

    None if what does not depend on the rows is too much.
    """
    kinds = planned.size(1).kinds
    fixed_bytes = sum(num_bytes for kind, num_bytes in kinds.items() if kind in _SHARDED)
    while fixed_bytes < planned.device.usable_bytes and (seq_len := seq_len // 2) >= _SHORTEST_ROWS:
        yield seq_len

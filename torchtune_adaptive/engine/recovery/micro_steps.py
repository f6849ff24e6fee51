"""A micro-step, and how a rank finds out alone which collectives it issues."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torchtune_adaptive.engine.distributed.fsdp_state import drop_forward_passes
from torchtune_adaptive.engine.distributed.functional_collectives import CannotRecordError, FunctionalCollective
from torchtune_adaptive.engine.distributed.ledger import AnyCollective, Ledger

Result = TypeVar("Result")


@dataclass(frozen=True)
class MicroStep(Generic[Result]):
    """A forward and backward pass over ``num_rows`` rows.

    Attributes:
        with_rows: runs so many rows instead, all as long as the longest one; None: that is not possible.
    """

    run: Callable[[], Result]
    num_rows: int = 0
    with_rows: Callable[[int], object] | None = None

    def __call__(self) -> Result:
        return self.run()


def collectives_of(micro_step: Callable[[], object], ledger: Ledger, states: list[Any]) -> list[AnyCollective]:
    """The collectives that ``micro_step`` issues, from passes over one row and two rows without communication.

    Their sizes are linear in the number of rows, if all are padded to one length. This is not a collective. It leaves
    wrong gradients.

    Args:
        states: FSDP2's states of the model.

    Raises:
        CannotRecordError: they cannot be found in this way.
    """
    if not isinstance(micro_step, MicroStep) or micro_step.with_rows is None or not ledger.can_record_dry:
        raise CannotRecordError("the model issues collectives of its own, whose sizes are not known")
    noted: list[list[AnyCollective]] = []
    for num_rows in (1, 2):
        drop_forward_passes(states)
        with ledger.dry_recording() as collectives:
            micro_step.with_rows(num_rows)
        noted.append(collectives)
    one, two = noted
    if len(one) != len(two):
        raise CannotRecordError("two rows issue other collectives than one")
    return [_with_rows(small, large, micro_step.num_rows) for small, large in zip(one, two, strict=True)]


def _with_rows(small: AnyCollective, large: AnyCollective, num_rows: int) -> AnyCollective:
    """The collective of ``num_rows`` rows, from that of one row and that of two."""
    if isinstance(small, FunctionalCollective) and isinstance(large, FunctionalCollective):
        numel = small.numel + (num_rows - 1) * (large.numel - small.numel)
        small, large = small._replace(numel=numel), large._replace(numel=numel)
    if small != large:
        raise CannotRecordError(f"two rows issue {large.description()}, but one row {small.description()}")
    return small

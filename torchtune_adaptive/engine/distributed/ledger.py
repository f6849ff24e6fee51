"""Record the collectives of a micro-step, and replay those that a failed rank has not issued.

When one rank fails, its peers wait for it in their next collective. The ledger knows the collectives of a whole
micro-step (the expected ones) and those that the rank has already issued, so the rank can issue the rest without
computing. All ranks then issue the same sequence. Recording adds a list entry per collective; it neither
communicates nor waits for the device.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.functional_collectives import (
    DryRecordFunctional,
    FunctionalCollective,
    IssuedCounts,
    groups_of,
)


class CollectiveStateUnknownError(RuntimeError):
    """It is unknown which collectives this rank has issued. The run must end, or collectives would be mismatched."""


class Collective(NamedTuple):
    """One collective. ``numel`` counts elements per rank, and ``place`` is the number of its FSDP2 module or bucket."""

    kind: str
    place: int
    numel: int
    dtype: torch.dtype
    group: dist.ProcessGroup
    op: Any = None

    def description(self) -> str:
        """Describe what must be equal on every rank. The group itself is not included: under HSDP groups differ."""
        op = self.op if isinstance(self.op, dist.ReduceOp.RedOpType) else type(self.op).__name__
        return f"{self.kind} of {self.numel} {self.dtype} among {self.group.size()} ranks at {self.place} by {op}"


AnyCollective: TypeAlias = Collective | FunctionalCollective


class Ledger(ABC):
    """Records the collectives of one micro-step at a time, and replays the rest of it.

    Collectives that the model issues itself are only counted, by torch. Their sizes depend on the batch: after a
    failure, the rank works them out alone, in a micro-step of few rows (``dry_recording``).

    Attributes:
        expected: the collectives of a whole micro-step, which must be the same on every rank and for every batch.
            First those of a micro-step that is not the last one of its optimizer step, then those of the last one.
        counts: counts the collectives that the model issues itself.
        unused: trained parameters without a gradient on this rank in the last micro-step, for which zeros were reduced.
    """

    can_record_dry = False  # whether ``dry_recording`` works

    def __init__(self, device: torch.device, *, reduces_once: bool) -> None:
        """With gradients reduced in the last micro-step of an optimizer step only, or in each one."""
        self.reduces_once = reduces_once
        self._device = device
        self.expected: tuple[list[AnyCollective], list[AnyCollective]] = ([], [])
        self.is_last = True
        self.counts = IssuedCounts()
        self.unused: set[nn.Parameter] = set()
        self.of_any_code = IssuedCounts()  # counts for the process groups in which it issues collectives
        self.expected_numbers: tuple[Counter[Any], Counter[Any]] | None = None  # as ``expected``, of any code's
        self._issued: list[AnyCollective] = []
        self._noted: list[AnyCollective] | None = None
        self._in_doubt = False

    @abstractmethod
    def detach(self) -> None:
        """Restore the model as it was."""

    @abstractmethod
    def running(self) -> AbstractContextManager[None]:
        """Context of a micro-step. Unless it fails, its gradients are reduced afterwards, if they must be."""

    @abstractmethod
    def _replay(self, collective: Collective) -> None:
        """Issue ``collective`` without computing, and record it."""

    def start_step(self) -> None:  # noqa: B027
        """Issue the collectives that come before the first micro-step of an optimizer step."""

    def drop_unused(self, consensus: Consensus) -> None:  # noqa: B027
        """Set gradients to None that no rank has computed. A collective; only if some rank has ``unused`` ones."""

    @contextmanager
    def dry_recording(self) -> Iterator[list[AnyCollective]]:
        """Context of a micro-step without communication. Yields a list of the collectives that it would issue."""
        self._noted = noted = []
        try:
            with DryRecordFunctional(noted.append), self.running():
                yield noted
        finally:
            self._noted = None

    def is_dry(self, collective: Collective) -> bool:
        """Whether ``collective`` must not be issued, because it is only noted."""
        if self._noted is None:
            return False
        self._noted.append(collective)
        return True

    @property
    def issued(self) -> list[AnyCollective]:
        """A copy of the collectives since ``begin``."""
        return list(self._issued)

    @property
    def expected_now(self) -> list[AnyCollective]:
        """The collectives of the present micro-step, if nothing fails."""
        return self.expected[self.is_last]

    @property
    def agrees(self) -> bool:
        """Whether the collectives since ``begin`` are the expected ones, and other code has issued as many as then."""
        numbers = self.of_any_code.since_start()
        is_known = self.expected_numbers is None or numbers == self.expected_numbers[self.is_last]
        return self._issued == self.expected_now and is_known

    def begin(self, *, is_last: bool) -> None:
        """Start recording a new micro-step, which may be the last one of its optimizer step."""
        self.is_last = is_last
        self._issued.clear()
        self._in_doubt = False
        self.of_any_code.start()
        self.counts.start()

    def issuing(self) -> None:
        """Note that a collective is about to be issued. Until ``record`` it is unknown whether it was issued."""
        self._in_doubt = True

    def record(self, collective: AnyCollective) -> None:
        """Note that ``collective`` was issued."""
        self._issued.append(collective)
        self._in_doubt = False

    def replay_rest(self, whole: Sequence[AnyCollective] | None = None) -> None:
        """Issue the collectives of the micro-step that were not issued since ``begin``, while the peers issue theirs.

        The peers' gradients must be thrown away. Call ``reset_after_failure`` on the model first.

        Args:
            whole: all collectives of the micro-step, in order. None: the expected ones, as no others are issued.

        Raises:
            CollectiveStateUnknownError: the last collective failed while it was issued, the issued ones are not the
                first ones of the micro-step, or a replayed one failed.
        """
        if self._in_doubt:
            raise CollectiveStateUnknownError("a collective itself failed, so that it is unknown whether it was issued")
        whole = self.expected_now if whole is None else whole
        counts = self.counts.since_start()
        done = len(self._issued) + counts.total()
        recorded = [one for one in whole[:done] if isinstance(one, Collective)]
        if recorded != self._issued or counts != Counter(groups_of(whole[:done])):
            raise CollectiveStateUnknownError("the issued collectives are not the first ones of the dry run")
        for collective in whole[done:]:
            try:
                if isinstance(collective, FunctionalCollective):
                    collective.replay(self._device)
                else:
                    self._replay(collective)
            except Exception as error:
                raise CollectiveStateUnknownError(
                    f"issuing this rank's {collective.kind} without computing failed: {error}"
                ) from error
            if isinstance(collective, Collective) and self._issued[-1:] != [collective]:
                raise CollectiveStateUnknownError(f"this rank's {collective.kind} was not issued as in the dry run")

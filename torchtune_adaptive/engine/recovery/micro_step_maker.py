"""How micro-steps are made of micro-batches."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.recovery.columns import copied, was_changed
from torchtune_adaptive.engine.recovery.micro_steps import MicroStep
from torchtune_adaptive.engine.recovery.watch import PressureWatch

PaddedRows = Callable[[Any], tuple[int, Callable[[int], Any]]]


@dataclass(eq=False)
class MicroStepMaker:
    """Makes the micro-steps of micro-batches.

    Attributes:
        limited: the meter that limits the memory of micro-steps; None: only that of ``loop`` limits those of a trial.
        keeps_batches: whether a micro-batch must be as before after its micro-step, which may run again.
        padded_rows: as that of ``RecoverableStep``.
        gives_copies: whether micro-steps get copies of tensors, because one has changed a batch in place.
    """

    loop: Loop
    watch: PressureWatch
    _: KW_ONLY
    limited: MemoryMeter | None
    keeps_batches: bool
    padded_rows: PaddedRows | None
    gives_copies: bool = field(default=False, init=False)

    def of(self, micro_batches: Iterable[Any]) -> list[MicroStep[Any]]:
        """A micro-step of each micro-batch."""
        return [self._of_one(one, self.limited) for one in micro_batches]

    def of_trial(self, micro_batches: Iterable[Any]) -> list[MicroStep[Any]]:
        """A micro-step of each micro-batch of a trial, which sees whether they are changed in place."""
        return [self._of_one(one, self.loop.meter, sees_changes=self.keeps_batches) for one in micro_batches]

    def _of_one(self, micro_batch: Any, meter: MemoryMeter | None, *, sees_changes: bool = False) -> MicroStep[Any]:
        run = partial(self._run, meter, micro_batch, sees_changes=sees_changes)
        if self.padded_rows is None:
            return MicroStep(run)
        num_rows, with_rows = self.padded_rows(micro_batch)
        return MicroStep(run, num_rows, lambda number: self._run(meter, with_rows(number)))

    def _run(self, meter: MemoryMeter | None, micro_batch: Any, *, sees_changes: bool = False) -> Any:
        with meter or nullcontext(), self.watch.noting_failures():
            self.watch.phases.enter("batch")
            given = micro_batch
            if self.keeps_batches:  # changes of arrays, lists and mappings would not be seen in later steps
                given = copied(micro_batch, with_tensors=sees_changes or self.gives_copies)
            result = self.loop.micro_step(given)
        if sees_changes:
            self.gives_copies |= was_changed(given, micro_batch)
        return result

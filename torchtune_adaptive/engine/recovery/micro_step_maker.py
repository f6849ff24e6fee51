"""How micro-steps are made of micro-batches."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.recovery.columns import copied, was_changed
from torchtune_adaptive.engine.recovery.micro_steps import MicroStep
from torchtune_adaptive.engine.recovery.watch import PressureWatch

PaddedRows = Callable[[Any], tuple[int, Callable[[int], Any]]]


class MicroStepMaker:
    """Makes the micro-steps of micro-batches.

    Args:
        limited: the meter that limits the memory of micro-steps; None: only that of ``loop`` limits those of a trial.
        keeps_batches: whether a micro-batch must be as before after its micro-step, which may run again.
        padded_rows: as that of ``RecoverableStep``.

    Attributes:
        gives_copies: whether micro-steps get copies of tensors, because one has changed a batch in place.
    """

    def __init__(
        self,
        loop: Loop,
        watch: PressureWatch,
        *,
        limited: MemoryMeter | None,
        keeps_batches: bool,
        padded_rows: PaddedRows | None,
    ) -> None:
        self._loop = loop
        self._watch = watch
        self._limited = limited
        self._keeps_batches = keeps_batches
        self._padded_rows = padded_rows
        self.gives_copies = False

    def of(self, micro_batches: Iterable[Any]) -> list[MicroStep[Any]]:
        """A micro-step of each micro-batch."""
        context = self._limited or nullcontext()
        return [self._of_one(one, context) for one in micro_batches]

    def of_trial(self, micro_batches: Iterable[Any]) -> list[MicroStep[Any]]:
        """A micro-step of each micro-batch of a trial, which sees whether they are changed in place."""
        context = self._loop.meter or nullcontext()
        return [self._of_one(one, context, sees_changes=self._keeps_batches) for one in micro_batches]

    def _of_one(
        self, micro_batch: Any, context: AbstractContextManager[Any], *, sees_changes: bool = False
    ) -> MicroStep[Any]:
        run = partial(self._run, context, micro_batch, sees_changes=sees_changes)
        if self._padded_rows is None:
            return MicroStep(run)
        num_rows, with_rows = self._padded_rows(micro_batch)
        return MicroStep(run, num_rows, lambda number: self._run(context, with_rows(number)))

    def _run(self, context: AbstractContextManager[Any], micro_batch: Any, *, sees_changes: bool = False) -> Any:
        with context, self._watch.noting_failures():
            self._watch.phases.enter("batch")
            given = micro_batch
            if self._keeps_batches:  # changes of arrays, lists and mappings would not be seen in later steps
                given = copied(micro_batch, with_tensors=sees_changes or self.gives_copies)
            result = self._loop.micro_step(given)
        if sees_changes:
            self.gives_copies |= was_changed(given, micro_batch)
        return result

"""The dry runs of a training: when one is needed, with which samples, and what follows from it."""

import logging
from typing import Any

from torchtune_adaptive.engine.distributed.fsdp_state import drop_forward_passes, fsdp_states
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.recovery.assumptions import Assumptions
from torchtune_adaptive.engine.recovery.attempts import Recovery
from torchtune_adaptive.engine.recovery.dry_run import DryRun, allocate_states, dry_run
from torchtune_adaptive.engine.recovery.micro_batches import Cutter
from torchtune_adaptive.engine.recovery.micro_step_maker import MicroStepMaker
from torchtune_adaptive.engine.recovery.optimizer_state import check_optimizers, drop_unused_states
from torchtune_adaptive.engine.recovery.trial import ResultsError, cannot_cut
from torchtune_adaptive.errors import InputError, cannot_recover, reason_of

log = logging.getLogger(__name__)

_MOST_TRIALS = 8  # until it is known whether samples may be cut
_MOST_SAMPLES = 8  # that a trial takes, until two of them have gradients


class Preparation:
    """Makes the dry runs of a training. All ranks together.

    Args:
        micro_steps: makes micro-steps of the micro-batches of ``cutter``.
        reduces_once: whether FSDP2 reduces gradients in the last micro-step of an optimizer step only.

    Attributes:
        recovery: what the last dry run has made possible. None: there was none, or ``end`` was called.
    """

    def __init__(self, loop: Loop, cutter: Cutter, micro_steps: MicroStepMaker, *, reduces_once: bool) -> None:
        self._loop = loop
        self._cutter = cutter
        self._micro_steps = micro_steps
        self._reduces_once = reduces_once
        self._assumptions: Assumptions | None = None
        self._trials_left = 0 if cutter.adds_up else _MOST_TRIALS
        self._has_warned = False  # that it is not known whether samples may be cut
        self.recovery: Recovery | None = None

    def end(self) -> None:
        """Restore the model's own communication functions."""
        if self.recovery is not None:
            self.recovery.close()
            self.recovery = None

    def check_no_gradients(self) -> None:
        if self._assumptions is not None and self._assumptions.has_gradients():
            raise InputError(
                "Gradients must be None before a step, which may run again: call `optimizer.zero_grad()` after each"
                " step, also a skipped one, without `set_to_none=False`, and pass all samples of a step in one call."
            )

    def what_has_changed(self) -> str:
        """Why what the last dry run has found may no longer hold on this rank, or ""."""
        if self.recovery is not None and self.recovery.has_other_settings:
            return "settings of FSDP2 have changed"  # other collectives gather parameters
        return "" if self._assumptions is None else self._assumptions.broken()

    def may_compare(self, samples: Any) -> bool:
        """Whether only now two samples can be compared."""
        return self._trials_left > 0 and self._cutter.num_to_try(samples) > 1

    def dry_run(self, samples: Any) -> None:
        """Make a dry run with some of ``samples``. A collective. See ``RecoverableStep.dry_run``."""
        self.end()
        drop_forward_passes(fsdp_states(self._loop.model))  # after one, some parameters are whole instead of sharded
        self._assumptions = Assumptions(self._loop.model)
        check_optimizers(self._loop.optimizers, self._loop.model)
        self.check_no_gradients()
        allocate_states(self._loop)
        used = []
        try:
            found = self._dry_run_with_samples_that_count(samples)
            self.recovery, used = found.recovery, found.used
            self._assumptions.see_modules()
        finally:
            drop_unused_states(self._loop.optimizers, used)

    def _dry_run_with_samples_that_count(self, samples: Any) -> DryRun:
        """A dry run with two samples that have gradients, if a few tries find them.

        Raises:
            CannotRecoverError: no micro-step leaves a gradient.
        """
        if self._cutter.adds_up:
            return self._dry_run(samples, None)
        self._trials_left -= 1
        candidates = min(self._loop.consensus.max_over_ranks(self._cutter.num_to_try(samples)), _MOST_SAMPLES)
        pair, following = [0, 1], 2
        while True:
            found = self._dry_run(samples, (pair[0], pair[1]) if candidates > 1 else None)
            counts = found.verdict.counts
            if all(counts) or following + counts.count(False) > candidates:
                break
            found.recovery.close()
            for place in (place for place in (0, 1) if not counts[place]):
                pair[place], following = following, following + 1
        if candidates > 3 and not any(found.verdict.counts):  # a loss may need several samples, as one over pairs does
            found.recovery.close()
            found = self._dry_run(samples, (0, 1), group=candidates // 2)
        if found.verdict.factor is not None or found.verdict.is_random or not candidates:
            self._trials_left = 0
        if candidates and found.verdict.factor is None:
            self._warn_of_unknown(samples, is_random=found.verdict.is_random)
        if candidates and not found.used:
            found.recovery.close()
            raise cannot_recover("a micro-step leaves no gradient in `.grad` of any parameter")
        return found

    def _warn_of_unknown(self, samples: Any, *, is_random: bool) -> None:
        """Warn once that no trial has shown whether samples may be cut: if they are cut now, or no trial follows."""
        has_effect = self._loop.consensus.any_rank(not self._cutter.is_whole(samples)) or not self._trials_left
        if not has_effect or self._has_warned:
            return
        self._has_warned = True
        if self._loop.consensus.rank == 0:
            log.warning(
                "It is not known whether samples may be cut into micro-batches, because %s: the loss must be a sum, and"
                " a micro-step must not depend on earlier ones.",
                "a micro-step draws random numbers that cannot be fixed, or depends on what earlier ones have left"
                " outside of the model"
                if is_random
                else "two could not be compared",
            )

    def _dry_run(self, samples: Any, pair: tuple[int, int] | None, *, group: int = 1) -> DryRun:
        """A dry run with these two samples, if there are two, or groups of samples.

        Raises:
            CannotCutError: samples must not be cut into micro-batches.
            ResultsError: results do not add up.
        """
        trial_batches = list(self._cutter.trial_batches(samples, pair, group=group))
        self._check_ranks(has_samples=bool(trial_batches))
        try:
            found = dry_run(
                self._loop,
                [self._micro_steps.of_trial(parts) for parts in trial_batches],
                reduces_once=self._reduces_once,
                is_trial=not self._cutter.adds_up,
                compares_results=self._cutter.results != "sums",
            )
        except ResultsError as error:
            if self._cutter.results == "losses":
                raise cannot_cut(reason_of(error)) from None
            raise
        reason, factor = found.verdict.reason, found.verdict.factor
        if factor is not None:
            reason = self._cutter.scale_by(factor)
        if found.verdict.why_no_sum and self._cutter.results == "losses":  # by which a trainer would scale them
            reason = f"a micro-step draws random numbers that cannot be fixed. {found.verdict.why_no_sum}"
        if reason:
            found.recovery.close()
            raise cannot_cut(reason)
        return found

    def _check_ranks(self, *, has_samples: bool) -> None:
        """Check the micro-batch size, the samples and the trained parameters of all ranks."""
        smallest, largest = self._loop.consensus.min_and_max(self._cutter.size)
        if smallest != largest:
            raise InputError(
                f"`micro_batch_size` must be the same on every rank, but is {smallest} on one and {largest} on another."
            )
        if self._loop.consensus.any_rank(not has_samples):
            raise InputError("A rank has no samples for this optimizer step.")
        are_trained = tuple(parameter.requires_grad for parameter in self._loop.model.parameters())
        smallest, largest = self._loop.consensus.min_and_max(hash(are_trained))
        if smallest != largest:
            raise InputError("Ranks must train the same parameters, but their `requires_grad` differs between ranks.")

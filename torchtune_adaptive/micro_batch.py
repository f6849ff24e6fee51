"""The micro-batch of a recipe: made smaller after out-of-memory errors, and larger again at an epoch's start."""

import functools
import operator
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import utils

from torchtune_adaptive.batch.limits import halvings
from torchtune_adaptive.cutting import AdaptiveCutting
from torchtune_adaptive.data import num_tokens
from torchtune_adaptive.distributed.dry_run import rehearse
from torchtune_adaptive.distributed.recovery import Attempt, Recovery, Strain
from torchtune_adaptive.distributed.snapshot import keep_random_states
from torchtune_adaptive.distributed.vote import Outcome, run_together
from torchtune_adaptive.errors import NothingFitsError
from torchtune_adaptive.memory.allocator_retries import RetryWatch
from torchtune_adaptive.memory.devices import meter_for
from torchtune_adaptive.micro_step import MicroStep
from torchtune_adaptive.refuse import why_unrecoverable
from torchtune_adaptive.search.find import first_that_fits
from torchtune_adaptive.text import format_bytes, ranks_text
from torchtune_adaptive.training.optimizer_state import allocate_state
from torchtune_adaptive.worst_case import Row, small_batches, window_maker

log = utils.get_logger("DEBUG")


class AdaptiveMicroBatch(AdaptiveCutting):
    """Keeps training within memory: micro-batches become smaller once they did not fit."""

    _phase = ""
    _oom_retries = 0

    def _adapt(self, cfg: DictConfig) -> None:
        super()._adapt(cfg)
        meter = self._meter
        self._watch = RetryWatch(lambda: 0 if meter is None else meter.total_retries)
        self._recovery = self._prepare_recovery(cfg) if self._adaptive.oom_recovery else None
        if cfg.get("compile", False):
            torch.compiler.reset()  # what was compiled for probes would make training's own sizes dynamic ones

    def _prepare_recovery(self, cfg: DictConfig) -> Recovery | None:
        """Make the optimizer's state and rehearse a micro-step, while memory is free. A collective."""
        reason = why_unrecoverable(cfg)
        if not reason:
            if run_together(self._allocate_state, self._consensus) is Outcome.OUT_OF_MEMORY:
                raise NothingFitsError(
                    "the optimizer's state must fit beside model and gradients, but does not"
                    f" ({self._all_figures()}); an 8-bit optimizer, LoRA or more ranks would need less."
                )
            found = self._rehearse_micro_steps(self._dataloader.batch_size)
            if found is Outcome.OUT_OF_MEMORY and self._dataloader.batch_size > 1:
                found = self._rehearse_micro_steps(1)
            if isinstance(found, Recovery):
                return found
            if found is Outcome.OUT_OF_MEMORY:
                raise NothingFitsError(
                    "the first rows of the data set must fit, but their forward and backward ran out of memory"
                    f" ({self._all_figures()});"
                    " shorter rows, activation checkpointing, LoRA or more ranks would need less."
                )
            reason = found
        utils.log_rank_zero(log, f"An out-of-memory error in training will end the run: {reason}.")
        return None

    def _rehearse_micro_steps(self, batch_size: int) -> Recovery | str | Outcome:
        """As ``rehearse``, on first samples of the data set. A collective."""
        with keep_random_states():  # the data set's transforms may draw from them
            batches = small_batches(self._dataloader.dataset, batch_size)
        micro_steps = [partial(self._metered, self._micro_step, rows) for rows in batches]
        return rehearse(
            micro_steps,
            model=self._model,
            device=self._device,
            consensus=self._consensus,
            forget=self._renew_offloading,
        )

    def _allocate_state(self) -> None:
        if allocate_state(self._optimizer) and self._meter is not None:
            self._meter.count([list(values.values()) for values in self._optimizer.state.values()])

    def _survive(self, window: Sequence[Row]) -> MicroStep:
        """The sum of the micro-steps over ``window``, in smaller ones if a rank runs out of memory. A collective.

        Raises:
            NothingFitsError: not even single rows fit; on every rank, with the same sentence.
        """
        if self._recovery is None:
            return functools.reduce(operator.add, (run() for run in self._micro_steps(window)))
        restore = self._recovery.keep()
        while True:
            attempt = self._recovery.attempt(self._micro_steps(window), is_thrashing=self._watch.is_thrashing)
            if attempt.strain is not Strain.NONE:
                self._shrink(attempt, window)
            if attempt.result is not None:
                return attempt.result
            restore()

    def _shrink(self, attempt: Attempt[Any], window: Sequence[Row]) -> None:
        """Halve the micro-batch, from now on if a step failed, from the next step on if it was slow. A collective."""
        before = self._limit
        cuts = before.cut([num_tokens(row) for row in window])
        can_shrink = self._consensus.any_rank(any(len(cut) > 1 for cut in cuts))
        cause = self._cause(attempt)
        self._begin_anew()
        if attempt.strain is Strain.OUT_OF_MEMORY:
            self._oom_retries += 1
            if not can_shrink:
                raise NothingFitsError(
                    f"a single row per micro-step must fit, but in step {self.global_step + 1} {cause};"
                    " shorter rows, activation checkpointing, LoRA or more ranks would need less."
                )
        if not can_shrink:
            utils.log_rank_zero(log, f"micro-batch stays at a single row, although {cause}")
            self._watch.stop()  # nothing more can be done
            return
        self._largest_micro_batch = before.size // 2
        self._note_micro_batch(f"micro-batch {before.size} -> {self._limit}: in step {self.global_step + 1} {cause}")

    def _cause(self, attempt: Attempt[Any]) -> str:
        """Which ranks had what strain, and the figures of the first of them. A collective; the same on every rank."""
        told = self._consensus.from_all_ranks((attempt.own_strain, self._phase, self._figures(), attempt.error))
        strained = {rank: figures for rank, (strain, *figures) in enumerate(told) if strain is attempt.strain}
        phase, figures, error = next(iter(strained.values()))
        if attempt.strain is Strain.THRASHING:
            return f"{ranks_text(strained)} gave back the allocator's cache in two steps in a row ({figures})"
        return f"{ranks_text(strained)} ran out of memory in {phase} ({figures}: {textwrap.shorten(error, 200)})"

    def _figures(self) -> str:
        """Peak and limit of this rank's device, as text."""
        if self._meter is None:
            return "not metered"
        limit_bytes = self._meter.limit_bytes or self._meter.available_bytes
        return f"peak {format_bytes(self._meter.peak_bytes)}, limit {format_bytes(limit_bytes)}"

    def _all_figures(self) -> str:
        """The figures of the ranks, equal ones once, three at most. A collective."""
        return "; ".join(list(dict.fromkeys(self._consensus.from_all_ranks(self._figures())))[:3])

    def _before_epoch(self, epoch: int) -> None:
        """Beside the growth of the batch: try larger micro-batches again, if errors made them small. A collective."""
        super()._before_epoch(epoch)
        before, largest = self._limit, self._largest_limit()
        if before == largest:
            return
        # Without a search the longest row is the longest so far: looking for it might take the whole data set.
        row = self._probe_row or self._longest_row
        assert row is not None
        window_rows = self._rows_at(self._batch_size)

        def make_window(size: int) -> list[list[Row]]:
            rows = min(largest.of_size(size).rows_of(num_tokens(row)), window_rows)
            return window_maker(row, micro_batches=-(-window_rows // rows))(rows)

        found = first_that_fits(
            halvings(largest.size, above=before.size),
            self._probe_step,
            make_window,
            model=self._model,
            optimizer=self._optimizer,
            device=self._device,
            meter=self._meter or meter_for(self._device, self._model, [self._optimizer]),
            settings=self._adaptive,
            consensus=self._consensus,
        )
        self._renew_offloading()
        self._begin_anew()
        if found is not None:
            self._largest_micro_batch = None if found == largest.size else found
            self._note_micro_batch(
                f"micro-batch {before.size} -> {self._limit}: fits again at the start of epoch {epoch}"
            )

    def _begin_anew(self) -> None:
        """What was metered until now says nothing of what comes."""
        self._watch.start_over()
        if self._meter is not None:
            self._meter.reset()

    def _note_micro_batch(self, reason: str) -> None:
        self._note(reason, step=self.global_step + 1, **{self._limit.key: self._limit.size})
        utils.log_rank_zero(log, reason)

    def _metered(self, work: Any, *args: Any) -> Any:
        """``work(*args)`` under the meter, if there is one."""
        if self._meter is None:
            return work(*args)
        with self._meter:
            return work(*args)

    def _enter_phase(self, name: str) -> None:
        self._phase = name
        if self._meter is not None:
            self._meter.enter_phase(name)

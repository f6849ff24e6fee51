"""The batch size of a recipe: what the search or the config gives, grown at epoch boundaries, kept over a resume."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig
from torchtune import utils

from torchtune_adaptive.batch.growth import Growth, next_batch_size, rehearse
from torchtune_adaptive.batch.noise_scale import MeasuredSchedule
from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.distributed.snapshot import keep_random_states
from torchtune_adaptive.memory.devices import meter_for
from torchtune_adaptive.micro_step import gradient_norms
from torchtune_adaptive.rate import follow, refuse_unfollowing, scale_of, set_rates
from torchtune_adaptive.record import AdaptiveRecord
from torchtune_adaptive.refuse import (
    refuse_async_checkpoints,
    refuse_impossible_limit,
    refuse_large_start,
    refuse_stepping_in_backward,
    refuse_unsearchable,
)
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.horizon import Horizon

log = utils.get_logger("DEBUG")


class AdaptiveBatch(AdaptiveRecord):
    """Keeps the batch size of the stock recipe below it, and the learning rate that goes with it.

    The annotated attributes are the stock recipe's own, as its ``setup`` leaves them.
    """

    total_epochs: int
    world_size: int
    _lr_scheduler: Any
    _setup_lr_scheduler: Callable[..., Any]

    def __init__(self, cfg: DictConfig) -> None:
        self._adaptive = AdaptiveSettings.from_cfg(cfg)
        if self._adaptive.searches:
            refuse_unsearchable(cfg)
        refuse_stepping_in_backward(cfg, self._adaptive)
        super().__init__(cfg=cfg)
        refuse_async_checkpoints(cfg, ranks=self.world_size)
        if self._adaptive.searches:
            refuse_impossible_limit(self._adaptive, self._device)
        self._consensus = Consensus()
        self._checkpoint_dir = cfg.checkpointer.get("output_dir", cfg.output_dir)

    def _adapt(self, cfg: DictConfig) -> None:
        """Set up the meter, find the sizes that the config asks for, and take them up. A collective."""
        limited = self._device.type == "cpu" and self._adaptive.memory_limit_bytes is not None  # there it costs time
        metered = limited or self._device.type == "cuda"
        self._meter = meter_for(self._device, self._model, _listed(self._optimizer), exact=False) if metered else None
        self._wanted_rows = cfg.batch_size
        self._reference_samples = cfg.batch_size * cfg.gradient_accumulation_steps * self._ranks
        self._begin_record()
        if (self._grows or self._adaptive.lr_scaling != "none") and self._lr_scheduler is not None:
            refuse_unfollowing(self._lr_scheduler)
        with keep_random_states():  # the data set's transforms and the user's function may draw from them
            self._rehearse_growth(self._batch_size, maximum=None)
            self._size(cfg)
            self._take_up(cfg)
        if self._meter is not None:
            self._meter.set_limit(self._adaptive.memory_limit_bytes)
            self._meter.reset()

    @property
    def _grows(self) -> bool:
        return self._adaptive.batch_increase_function is not None

    @property
    def _decides(self) -> bool:
        """Whether a step's samples are ours to choose or to cut, rather than by stock keys alone."""
        settings = self._adaptive
        return settings.searches or self._is_global or settings.max_tokens_per_micro_batch is not None

    def _take_up(self, cfg: DictConfig) -> None:
        """Begin with the batch size that search or config give; on resuming, where the run has brought it."""
        first = self._batch_size
        if self._result is not None and self._adaptive.use_maximum_batch_size and not self._is_global:
            assert self._fitting_rows is not None
            first = self._fitting_rows
        self._maximum = self._growth_maximum(first)
        sizes = [growth.batch_size for growth in self._rehearse_growth(first, maximum=self._maximum)]
        sizes = sizes or [first] * self.total_epochs
        present = sizes[self.epochs_run - 1] if self.epochs_run else first
        steps_done = sum(map(self._steps_at, sizes[: self.epochs_run]))
        self._schedule_steps = self._steps_at(first)
        saved = self._saved
        if saved is not None:
            steps_done, self._reference_samples = saved.global_step, saved.reference_samples
            self._schedule_steps = saved.schedule_steps
            if (self._grows or self._adaptive.use_maximum_batch_size) and saved.is_global == self._is_global:
                present = saved.batch_size
        rate_is_ours = self._decides or self._adaptive.lr_scaling != "none"
        if rate_is_ours:
            self._set_batch_size(present)
        if self._steps_per_epoch == 0:
            self._refuse_small_data(self._batch_size)
        if rate_is_ours:
            self._restart_schedule(cfg, steps_done)
        self.global_step = steps_done
        if saved is not None:
            self._go_on_from(saved)
        if self._decides:
            reason = f"{self._adaptive.strategy} search" if self._adaptive.use_maximum_batch_size else "config"
            self._decide(reason if not self.epochs_run else f"{reason}, resumed at epoch {self.epochs_run}")

    def _growth_maximum(self, first: int) -> int:
        """How large the batch may become, growing from ``first``."""
        limit, largest = self._adaptive.growth_limit, self._largest_batch_size()
        if limit != "memory":
            return min(limit, largest) if isinstance(limit, int) else largest
        if self._result is None:
            return largest
        if self._grows:
            refuse_large_start(first, self._result.exact_batch_size, bound=self._result.bound)
        return self._result.batch_size

    def _restart_schedule(self, cfg: DictConfig, steps_done: int) -> None:
        """Build the learning rate schedule for the first batch size, and go to where past epochs have brought it."""
        self._horizon = Horizon(self._schedule_steps)
        if self._lr_scheduler is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = copy.deepcopy(group["initial_lr"])  # a tensor is changed in place: not to be shared
            self._lr_scheduler = self._setup_lr_scheduler(
                cfg_lr_scheduler=cfg.lr_scheduler,
                num_training_steps=self.total_epochs * self._schedule_steps,
                last_epoch=self.epochs_run * self._schedule_steps - 1,
            )
        self._horizon.change(epoch=self.epochs_run, step=steps_done, steps_per_epoch=self._steps_per_epoch)
        if self._lr_scheduler is not None and self._rate_must_follow():
            follow(self._lr_scheduler, self._horizon, step=steps_done, scale=lambda: self._rate_scale)
        self._scale_rate()

    def _rate_must_follow(self) -> bool:
        """Whether a step of the optimizer is not a step of the schedule, now or later, or the rate is scaled."""
        is_as_built = self._steps_per_epoch == self._schedule_steps and not self._grows
        return self._adaptive.lr_scaling != "none" or not is_as_built

    def _scale_rate(self) -> None:
        """Scale the learning rate to the present batch."""
        rule, samples = self._adaptive.lr_scaling, self._samples_per_step_at(self._batch_size)
        self._rate_scale = scale_of(rule, samples=samples, reference_samples=self._reference_samples)
        if rule != "none":
            set_rates(self._optimizer, self._lr_scheduler, self._rate_scale)
            utils.log_rank_zero(
                log,
                f"learning rate * {self._rate_scale:.6g}: {rule} scaling to {samples} samples per optimizer step,"
                f" from the config's {self._reference_samples}",
            )

    def _before_epoch(self, epoch: int) -> None:
        """Ask the user's function for this epoch's increase, and follow it up to the maximum. A collective."""
        function = self._adaptive.batch_increase_function
        if function is None:
            return
        batch_size = self._batch_size
        growth = self._consensus.ask_rank_zero(
            lambda: next_batch_size(function, epoch=epoch, batch_size=batch_size, maximum=self._maximum)
        )
        if growth.increment:
            utils.log_rank_zero(log, growth.reason)
        if growth.granted:
            self._set_batch_size(growth.batch_size)
            self._horizon.change(epoch=epoch, step=self.global_step, steps_per_epoch=self._steps_per_epoch)
            self._scale_rate()
            self._decide(growth.reason, epoch=epoch)

    def _rehearse_growth(self, batch_size: int, *, maximum: int | None) -> list[Growth]:
        """What the user's function, if there is one, will answer for every epoch. A collective."""
        function = self._adaptive.batch_increase_function
        if function is None:
            return []
        return self._consensus.ask_rank_zero(
            lambda: rehearse(function, total_epochs=self.total_epochs, batch_size=batch_size, maximum=maximum)
        )

    def _measures(self) -> bool:
        """Whether the schedule wants to know of the next optimizer step's gradients."""
        function = self._adaptive.batch_increase_function
        return isinstance(function, MeasuredSchedule) and self.global_step % function.every_steps == 0

    def _measured(self) -> dict[str, float]:
        """What the schedule has learned from training so far."""
        function = self._adaptive.batch_increase_function
        return function.figures() if isinstance(function, MeasuredSchedule) else {}

    def _observe(self, measured: Sequence[float], *, num_tokens: int, samples: int) -> None:
        """Tell the schedule of an optimizer step's gradients."""
        function = self._adaptive.batch_increase_function
        assert isinstance(function, MeasuredSchedule)
        norms = gradient_norms(measured, num_tokens=num_tokens, samples=samples, ranks=self._ranks)
        if norms is not None:
            function.observe(norms)


def _listed(optimizer: Any) -> list[Any]:
    return [] if optimizer is None else [optimizer]

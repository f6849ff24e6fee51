"""Plan which batch sizes of a config fit on its ranks' devices, without a device."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.engine.search.strategies import NO_BOUND, binary_search, round_down_to_power_of_two
from torchtune_adaptive.errors import require_integer
from torchtune_adaptive.plan.gpu import Calibration, Overhead
from torchtune_adaptive.plan.host import HostPlan, Launch, plan_host
from torchtune_adaptive.plan.trace.client import trace
from torchtune_adaptive.plan.trace.peaks import StepPeaks, TracedStep
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.batch.rank_shares import check_samples_per_step, largest_share

# Row lengths to plan if neither the user nor the config gives any.
USUAL_SEQ_LENS = (2048, 4096, 8192)

Trace = Callable[..., TracedStep]  # with the parameters of ``client.trace``
Fits = Literal["yes", "perhaps", "no"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """The device of each rank: its memory in bytes, its calibration file if there is one, and its vendor."""

    memory_bytes: int
    calibration: Path | None = None
    is_amd: bool = False


@dataclass(frozen=True, kw_only=True)
class SizePlan:
    """Memory of a rank with ``batch_size`` rows of ``seq_len`` tokens.

    Attributes:
        peak_bytes: the traced peak.
        phases: traced peak of each phase.
        kinds: bytes of each kind at the highest of these peaks.
        allocated_bytes, reserved_bytes: forecasts of ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved``.
        process_bytes: the process's device memory, inside and outside of the allocator.
        uncertainty_bytes: how far the forecast may be off, in either direction.
        fits: "yes"; "no"; or "perhaps" if it fits by the forecast, but not with its full uncertainty added.
        tokens_per_step: tokens of an optimizer step over all ranks.
    """

    seq_len: int
    batch_size: int
    peak_bytes: float
    phases: dict[str, float]
    kinds: dict[str, float]
    allocated_bytes: float
    reserved_bytes: float
    process_bytes: float
    uncertainty_bytes: float
    fits: Fits
    tokens_per_step: int


@dataclass(frozen=True, kw_only=True)
class LengthPlan(SizePlan):
    """Batch sizes with rows of ``seq_len`` tokens, and the memory of the batch size to use.

    The size to use is at least 1, at most the exact one, and a power of two if the settings ask for it.

    Attributes:
        exact_batch_size: the largest that fits; 0 if none does, None if memory does not grow with it.
        certain_batch_size: the largest that fits with the full uncertainty added to the forecast.
        asked: the requested sizes.
    """

    exact_batch_size: int | None
    certain_batch_size: int | None
    asked: tuple[SizePlan, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What fits for each row length, with the inputs of the plan.

    Attributes:
        limit_bytes: usable memory of the GPU before the fraction ``margin`` is subtracted.
        host: host memory of a machine, with the sizes that need the most of it.
    """

    world_size: int
    card: Card
    limit_bytes: float
    margin: float
    lengths: tuple[LengthPlan, ...]
    step: TracedStep
    overhead: Overhead
    host: HostPlan

    @property
    def usable_bytes(self) -> float:
        """The device memory that a process may use."""
        return self.overhead.usable_bytes(self.limit_bytes, self.margin)

    @property
    def fits(self) -> bool:
        """Whether a batch fits for at least one of the lengths."""
        return any(length.exact_batch_size != 0 for length in self.lengths)


def plan(
    cfg: DictConfig,
    *,
    world_size: int,
    card: Card,
    seq_lens: Sequence[int],
    batch_sizes: Sequence[int] = (),
    ranks_of_machine: int | None = None,
    traced_by: Trace = trace,
) -> Plan:
    """Plan ``cfg`` on ``world_size`` ranks with a ``card`` each.

    Args:
        ranks_of_machine: ranks per machine, for its host memory; None: all are on one machine.
        batch_sizes: rows per rank to plan beside the largest batch.
    Raises:
        InputError: the config or the calibration is invalid.
    """
    settings = AdaptiveSettings.from_cfg(cfg)
    micro_steps = require_integer("gradient_accumulation_steps", cfg.get("gradient_accumulation_steps", 1), minimum=1)
    if card.calibration is not None:
        Calibration.read(card.calibration)  # refuse a bad file before tracing
    if settings.global_batch_size is not None:
        check_samples_per_step(settings.global_batch_size, ranks=world_size)
    step = traced_by(as_traced(settings, cfg), world_size=world_size, seq_lens=seq_lens)
    overhead = _overhead(cfg, card, world_size, step.attention_width)
    memory_limit = settings.memory_limit_bytes or card.memory_bytes
    limit_bytes = min(card.memory_bytes, memory_limit + overhead.outside_bytes)
    planner = _LengthPlanner(
        settings,
        limit_bytes=limit_bytes,
        overhead=overhead,
        world_size=world_size,
        micro_steps=micro_steps,
        sequences=step.sequences,
    )
    lengths = tuple(planner.plan(peaks, batch_sizes) for peaks in step.peaks)
    return Plan(
        world_size=world_size,
        card=card,
        limit_bytes=limit_bytes,
        margin=settings.margin,
        lengths=lengths,
        step=step,
        overhead=overhead,
        host=_host(cfg, settings, step, lengths, world_size=world_size, ranks=ranks_of_machine or world_size),
    )


def as_traced(settings: AdaptiveSettings, cfg: DictConfig) -> DictConfig:
    """Return ``cfg`` with two micro-steps per optimizer step if training may use any number of them.

    Two need as much memory as more: from the second one on, gradients of earlier micro-steps are in memory.
    """
    if not (settings.global_batch_size or settings.max_tokens_per_micro_batch or settings.growth_limit != "memory"):
        return cfg
    traced = OmegaConf.merge(cfg, {"gradient_accumulation_steps": 2})
    assert isinstance(traced, DictConfig)
    return traced


class _LengthPlanner:
    """Plans the batch sizes of one launch, for rows of a given length."""

    def __init__(
        self,
        settings: AdaptiveSettings,
        *,
        limit_bytes: float,
        overhead: Overhead,
        world_size: int,
        micro_steps: int,
        sequences: int,
    ) -> None:
        self._settings = settings
        self._overhead = overhead
        self._world_size = world_size
        self._micro_steps = micro_steps
        self._sequences = sequences
        self._limit_bytes = limit_bytes

    def plan(self, peaks: StepPeaks, batch_sizes: Sequence[int]) -> LengthPlan:
        """Plan rows of the length of ``peaks``, and the memory of ``batch_sizes`` of them."""
        exact = self._largest(peaks, certain=False)
        return LengthPlan(
            exact_batch_size=exact,
            certain_batch_size=self._largest(peaks, certain=True),
            asked=tuple(SizePlan(**self._figures(peaks, batch_size)) for batch_size in batch_sizes),
            **self._figures(peaks, self._batch_size_to_use(exact)),
        )

    def _figures(self, peaks: StepPeaks, batch_size: int) -> dict[str, Any]:
        """The values of a ``SizePlan``."""
        moment = peaks.moment(batch_size)
        peak_bytes = moment.total.at(batch_size)
        num_tokens = self._padded_tokens(batch_size, peaks)
        reserved_bytes = self._overhead.reserved_bytes(peak_bytes, num_tokens=num_tokens)
        samples_per_step = self._settings.global_batch_size or batch_size * self._micro_steps * self._world_size
        certainly, probably = (self._fits(peaks, batch_size, certain=certain) for certain in (True, False))
        return {
            "seq_len": peaks.seq_len,
            "batch_size": batch_size,
            "peak_bytes": peak_bytes,
            "phases": peaks.phases(batch_size),
            "kinds": moment.at(batch_size),
            "allocated_bytes": self._overhead.allocated_bytes(peak_bytes, num_tokens=num_tokens),
            "reserved_bytes": reserved_bytes,
            "process_bytes": reserved_bytes + self._overhead.outside_bytes,
            "uncertainty_bytes": self._overhead.uncertainty_bytes_at(peak_bytes),
            "fits": "yes" if certainly else "perhaps" if probably else "no",
            "tokens_per_step": samples_per_step * self._sequences * peaks.seq_len,
        }

    def _largest(self, peaks: StepPeaks, *, certain: bool) -> int | None:
        """The largest batch size that fits; None if memory does not grow with the batch size."""
        fits = partial(self._fits, peaks, certain=certain)
        # Not from 1, because a single row may need more memory than two.
        largest = binary_search(fits, start=2, max_batch_size=NO_BOUND)
        return None if largest == NO_BOUND else largest

    def _fits(self, peaks: StepPeaks, batch_size: int, *, certain: bool) -> bool:
        """Whether the batch fits; if ``certain``, with the uncertainty added to the forecast."""
        peak_bytes = peaks.peak_bytes(batch_size)
        needed_bytes = peak_bytes + (self._overhead.uncertainty_bytes_at(peak_bytes) if certain else 0)
        return needed_bytes <= self._overhead.largest_traced_bytes(
            self._limit_bytes, self._settings.margin, num_tokens=self._padded_tokens(batch_size, peaks)
        )

    def _padded_tokens(self, batch_size: int, peaks: StepPeaks) -> int:
        """Tokens of a batch for flash attention, whose scratch memory rounds each sequence up to a multiple of 128."""
        return batch_size * self._sequences * math.ceil(peaks.seq_len / 128) * 128

    def _batch_size_to_use(self, exact: int | None) -> int:
        """The largest batch size that fits and that the settings allow; at least 1, so that there are figures."""
        settings = self._settings
        largest = (settings.max_batch_size or 1) if exact is None else exact
        bounds = [largest]
        if settings.max_batch_size is not None:
            bounds.append(settings.max_batch_size)
        if settings.global_batch_size is not None:
            bounds.append(largest_share(settings.global_batch_size, ranks=self._world_size))
        batch_size = max(1, min(bounds))
        return round_down_to_power_of_two(batch_size) if settings.power_of_two else batch_size


def _host(
    cfg: DictConfig,
    settings: AdaptiveSettings,
    step: TracedStep,
    lengths: Sequence[LengthPlan],
    *,
    world_size: int,
    ranks: int,
) -> HostPlan:
    """Host memory with the largest of the requested sizes, or else of the sizes to use."""
    sizes = [size for length in lengths for size in length.asked or (length,)]
    launch = Launch(
        world_size=world_size,
        ranks=ranks,
        on_cpu=str(cfg.device).startswith("cpu"),
        saves_state=cfg.get("epochs", 1) != 1,
        saves_in_background=settings.save_in_background or cfg.get("enable_async_checkpointing", False),
    )
    return plan_host(
        step.host,
        launch,
        step_bytes=max(size.peak_bytes for size in sizes),
        num_tokens=max(size.batch_size * step.sequences * size.seq_len for size in sizes),
    )


def _overhead(cfg: DictConfig, card: Card, world_size: int, attention_width: int) -> Overhead:
    if str(cfg.device).startswith("cpu"):
        return Overhead.none()
    if card.calibration is not None:
        return Overhead.from_calibration(card.calibration, world_size, attention_width=attention_width)
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return Overhead.default(
        world_size,
        attention_width=attention_width,
        expandable_segments="expandable_segments:True" in allocator,
        on_amd=card.is_amd,
    )

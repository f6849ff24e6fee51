"""What fits of a config on its ranks' devices, known without one."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from torchtune_adaptive.batch.sampler import most_rows
from torchtune_adaptive.errors import require_integer
from torchtune_adaptive.plan.client import trace
from torchtune_adaptive.plan.overhead import Calibration, Overhead
from torchtune_adaptive.plan.step_peaks import StepPeaks, TracedStep
from torchtune_adaptive.refuse import refuse_few_samples_per_step
from torchtune_adaptive.search.strategies import NO_BOUND, binary_search, round_down_to_power_of_two
from torchtune_adaptive.settings import AdaptiveSettings

# Rows of a plan where neither the user nor the config says how long they are.
USUAL_SEQ_LENS = (2048, 4096, 8192)

Trace = Callable[..., TracedStep]  # as ``planner.trace``


@dataclass(frozen=True, kw_only=True)
class Card:
    """The device of each rank: its memory in bytes, and the file of its calibration if there is one."""

    memory_bytes: int
    calibration: Path | None = None


@dataclass(frozen=True, kw_only=True)
class LengthPlan:
    """What fits with rows of ``seq_len`` tokens.

    Attributes:
        exact_batch_size: the largest that fits; 0 if none does, None if memory does not grow with it.
        certain_batch_size: the largest if the forecast is off against us by all of its uncertainty.
        batch_size: the one to use: the exact one, or the power of two at or below it; at least 1.
        peak_bytes: of a rank at ``batch_size``, traced; ``phases`` and ``kinds`` tell when and of what.
        added_bytes: what the device adds to it, ``outside_bytes`` included, give or take ``uncertainty_bytes``.
        tokens_per_step: of an optimizer step, over all ranks.
    """

    seq_len: int
    exact_batch_size: int | None
    certain_batch_size: int | None
    batch_size: int
    peak_bytes: float
    phases: dict[str, float]
    kinds: dict[str, float]
    added_bytes: float
    uncertainty_bytes: float
    tokens_per_step: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What fits of a config on its ranks' devices, by the length of rows, and what it rests on."""

    world_size: int
    card: Card
    margin: float
    lengths: tuple[LengthPlan, ...]
    step: TracedStep
    overhead: Overhead

    @property
    def fits(self) -> bool:
        """Whether a batch of any of the lengths fits."""
        return any(length.exact_batch_size != 0 for length in self.lengths)


def plan(cfg: DictConfig, *, world_size: int, card: Card, seq_lens: Sequence[int], traced_by: Trace = trace) -> Plan:
    """What fits of ``cfg`` on ``world_size`` ranks with a ``card`` each.

    Raises:
        InputError: the config or the calibration is refused.
    """
    settings = AdaptiveSettings.from_cfg(cfg)
    micro_steps = require_integer("gradient_accumulation_steps", cfg.get("gradient_accumulation_steps", 1), minimum=1)
    if card.calibration is not None:
        Calibration.read(card.calibration)  # refused before anything is traced
    samples = settings.global_batch_size
    if samples is not None:
        refuse_few_samples_per_step(samples, ranks=world_size)
    step = traced_by(settings.traced(cfg), world_size=world_size, seq_lens=seq_lens)
    overhead = _overhead(cfg, card, world_size, step.attention_width)
    limit_bytes = min(card.memory_bytes, (settings.memory_limit_bytes or card.memory_bytes) + overhead.outside_bytes)
    lengths: list[LengthPlan] = []
    for peaks in step.peaks:
        exact = _largest(peaks, overhead, limit_bytes, settings.margin, certain=False)
        certain = _largest(peaks, overhead, limit_bytes, settings.margin, certain=True)
        largest = (settings.max_batch_size or 1) if exact is None else exact
        rows = largest if samples is None else most_rows(samples, ranks=world_size)
        used = max(1, min(largest, settings.max_batch_size or largest, rows))
        used = round_down_to_power_of_two(used) if settings.power_of_two else used
        moment = peaks.moment(used)
        peak_bytes = moment.total.at(used)
        added_bytes = overhead.added_bytes(peak_bytes, num_tokens=used * _padded(peaks.seq_len))
        lengths.append(
            LengthPlan(
                seq_len=peaks.seq_len,
                exact_batch_size=exact,
                certain_batch_size=certain,
                batch_size=used,
                peak_bytes=peak_bytes,
                phases=peaks.phases(used),
                kinds=moment.at(used),
                added_bytes=added_bytes + overhead.outside_bytes,
                uncertainty_bytes=overhead.uncertainty_bytes_at(peak_bytes),
                tokens_per_step=(samples or used * micro_steps * world_size) * peaks.seq_len,
            )
        )
    return Plan(
        world_size=world_size, card=card, margin=settings.margin, lengths=tuple(lengths), step=step, overhead=overhead
    )


def _largest(peaks: StepPeaks, overhead: Overhead, limit_bytes: float, margin: float, *, certain: bool) -> int | None:
    """The largest batch size within the limit; if ``certain``, also were the forecast off by all that it may be."""

    def fits(batch_size: int) -> bool:
        num_tokens = batch_size * _padded(peaks.seq_len)
        peak_bytes = peaks.peak_bytes(batch_size)
        needed_bytes = peak_bytes + (overhead.uncertainty_bytes_at(peak_bytes) if certain else 0)
        return needed_bytes <= overhead.largest_traced_bytes(limit_bytes, margin, num_tokens=num_tokens)

    largest = binary_search(fits, start=2, max_batch_size=NO_BOUND)  # where 2 rows fit, a single one may not
    return None if largest == NO_BOUND else largest


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
    )


def _padded(seq_len: int) -> int:
    """Tokens of a row for flash attention, whose scratch is for multiples of 128."""
    return -(-seq_len // 128) * 128

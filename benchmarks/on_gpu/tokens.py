"""A token budget against fixed rows on rows of very different lengths, with the same limit and the same samples."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from benchmarks.live import timed_step
from benchmarks.on_gpu.random_recipe import (
    apart,
    apart_text,
    let_go,
    live_random_recipe,
    random_config,
    start_group,
)
from benchmarks.on_gpu.stage import Section, Stage
from benchmarks.tables import spread
from torchtune_adaptive.training.batch.loader import StepSamples

ROWS, TOKENS = "fixed rows", "token budget"
_SAMPLES_PER_STEP = 64
_ROUNDS = 4  # after a first one with lazy set-up
HEADER = ["variant", "micro-batch", "micro-steps per step", "padding", "tokens/s", f"/ {ROWS}", "peak / limit"]
HEADER += ["allocator retries", "OOMs", "losses"]


@dataclass
class Variant:
    """What was measured of a recipe, by step, including the first."""

    name: str
    limit: str  # of a micro-batch
    micro_steps: float = 0.0  # per optimizer step
    padding: float = 0.0  # share of the tokens computed with
    num_tokens: list[int] = field(default_factory=list)  # that are no padding
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: float = 0.0  # of allocated bytes, as a share of the limit
    retries: int = 0  # of the allocator
    ooms: int = 0

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each round."""
        return [tokens / seconds for tokens, seconds in zip(self.num_tokens, self.seconds, strict=True)][1:]

    def count(self, recipe: Any, steps: list[StepSamples]) -> None:
        """Cut every step as training will, and count micro-steps, tokens and padding."""
        micro_batches, numbers = recipe.trainer.micro_batches, []
        for samples in steps:
            numbers.append(len(micro_batches.cut(samples)))
            micro_batches.end_step()
        self.micro_steps = fmean(numbers)
        _, padded = micro_batches.state_dict()["padding"]
        micro_batches.take_padding()
        self.num_tokens = [sum(len(row["tokens"]) for row in samples.rows) for samples in steps]
        self.padding = 1 - sum(self.num_tokens) / padded

    def cells(self, baseline: "Variant") -> list[str]:
        """The cells below ``HEADER``."""
        ratios = [ours / theirs for ours, theirs in zip(self.speeds, baseline.speeds, strict=True)]
        figures = [f"{self.micro_steps:.1f}", f"{self.padding:.1%}", f"{median(self.speeds):.0f}", spread(ratios)]
        figures += [f"{self.peak:.0%}", str(self.retries), str(self.ooms)]
        return [self.name, self.limit, *figures, apart_text(apart(self.losses, baseline.losses))]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Both variants train under the limit, one after the other, on the same samples in each step.

    Not in turn, because both in memory would each leave the other less than the limit.
    """
    start_group(stage)
    text = [
        f"Config `{stage.lora}`, limit {stage.limit_text(stage.limits_bytes[-2])}, rows of up to {stage.seq_len} random"
        f" tokens (log-normal, median a quarter of that), {_SAMPLES_PER_STEP} samples per optimizer step, one process,"
        f" {_ROUNDS} timed steps under the limit; the learning rate is 0. Tokens are those that are no padding. *peak*:"
        " of allocated bytes; *allocator retries*: how often the allocator freed its cache in these steps, which takes"
        " time; *losses*: how far those of a step are apart, relative to fixed rows.",
    ]
    section = Section(title="A token budget against fixed rows", header=HEADER, text=text)
    variants: list[Variant] = []
    for name in (ROWS, TOKENS):
        one = _trained(stage, name)
        variants.append(one)
        section.rows.append(one.cells(variants[0]))
        data = {"variant": one.name, "padding": one.padding, "speeds": one.speeds, "peak": one.peak}
        section.data.append(data | {"retries": one.retries, "ooms": one.ooms, "losses": one.losses})
        yield [section]


def _trained(stage: Stage, name: str) -> Variant:
    """A variant that has trained on every step."""
    tokens = {"max_tokens_per_micro_batch": "auto"} if name == TOKENS else {}
    limit_bytes = stage.limits_bytes[-2]
    settings = {"global_batch_size": _SAMPLES_PER_STEP, "power_of_two": False, "memory_limit": limit_bytes} | tokens
    num_rows = (2 + _ROUNDS) * _SAMPLES_PER_STEP
    keys = {"epochs": 1, "use_maximum_batch_size": name == ROWS, "adaptive": settings}
    cfg = random_config(stage, stage.lora, num_rows=num_rows, lengths="random", **keys)
    recipe = live_random_recipe(cfg)
    trainer = recipe.trainer
    one = Variant(name, str(trainer.micro_batches.limit))
    steps = list(itertools.islice(trainer.loader.steps(0), 1 + _ROUNDS))
    one.count(recipe, steps)
    meter = trainer.step.meter
    meter.reset()
    for samples in steps:
        with meter:
            seconds, result = timed_step(recipe, samples)
        one.seconds.append(seconds)
        one.losses.append(result.loss)
    one.peak = max(meter.phase_peak_bytes.values()) / limit_bytes
    one.retries, one.ooms = meter.allocator_retries, trainer.recoverable.retries
    del trainer, meter
    let_go(recipe)
    return one

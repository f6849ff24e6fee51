"""What does a token budget gain over fixed rows, and over packed data?

    OMP_NUM_THREADS=1 python -m benchmarks.tokens [--cost]

Trains on two CPU ranks under one memory limit in four ways: with as many rows as fit, with the power of two below, with
a token budget, and with packs. All are in the same processes and take turns in every round, each with one whole
optimizer step. Those without packs get the same samples, and must have the same loss. With ``--cost`` the token budget
also trains with other costs of a micro-step than ``batch.limits`` assumes. Prints tables and writes them to
``results/tokens_cpu.md``.

On a CPU a meter that watches every operation enforces the limit; a GPU's allocator does so without extra time. So sizes
are searched for and peaks are measured under the meter, but steps are timed without it.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torchtune.datasets import PackedDataset

from benchmarks.live import live_recipe, loop_of, timed_step
from benchmarks.on_ranks import measured_on_ranks
from benchmarks.provenance import provenance
from benchmarks.tables import publish, spread, table
from benchmarks.turns import turns
from tests.support.recipe_runs import tiny_config
from torchtune_adaptive.training.batch import limits
from torchtune_adaptive.training.batch.loader import StepSamples
from torchtune_adaptive.training.batch.row_format import Row

RESULTS = Path(__file__).parent / "results" / "tokens_cpu.md"
RANKS = 2
LIMIT = "128MiB"  # per rank
SEQ_LEN = 256
SAMPLES_PER_STEP = (128, 512)  # over all ranks
ROUNDS = 5  # after a first one with lazy set-up
_METERED = 2  # steps, which take twice their time under the meter
ROWS, POWER, TOKENS, PACKED = VARIANTS = ("fixed rows", "fixed rows, power of two", "token budget", "packed")
OPTIONS: dict[str, dict[str, Any]] = {
    ROWS: {"use_maximum_batch_size": True, "adaptive__power_of_two": False},
    POWER: {"use_maximum_batch_size": True, "adaptive__power_of_two": True},
    TOKENS: {"adaptive__max_tokens_per_micro_batch": "auto"},
    PACKED: {"use_maximum_batch_size": True, "adaptive__power_of_two": False, "dataset__packed": True},
}
TAKEN = Fraction(limits._COST_OF_MICRO_STEP).limit_denominator(1024)
COSTS = sorted({TAKEN, *(Fraction(1, parts) for parts in (4, 8, 16, 32, 64, 128, 256))}, reverse=True)

PACKS_DIFFER = (
    "What packs change: torchtune tokenizes all samples before training and puts them, in the data set's order, one"
    f" after the other into rows of {SEQ_LEN} tokens, a new one where the next sample does not fit; what is left of a"
    " row is padding. Samples of a row do not see each other, for which each row has a mask of its own, on a CPU and"
    " with SDPA a dense one. So a step has a number of packs, chosen here to hold about as many samples, but not a"
    " number of samples; the same samples share a row in every epoch; and the batches are others than those of the"
    " config without packs. A token budget leaves each step's samples as they are, and its loss up to rounding.",
)
COST_IS = (
    "The token budget with other costs of a micro-step (`_COST_OF_MICRO_STEP`, as a share of a full micro-batch),"
    f" which decide how finely a step is cut; {TAKEN} is taken. On a small model a micro-step costs more beside its"
    " tokens, in proportion, than on a large one. In turn again, in rounds of their own:",
)


@dataclass
class Contestant:
    """A recipe that stays ready to train, and what was measured of it, over all ranks."""

    name: str
    recipe: Any
    steps: list[StepSamples]
    limit: str  # of a micro-batch
    cost: Fraction = TAKEN
    num_samples: list[int] = field(default_factory=list)  # by step
    num_tokens: list[int] = field(default_factory=list)  # real ones, by step
    micro_steps: float = 0.0  # per optimizer step
    padding: float = 0.0  # share of the tokens computed with
    peak: float = 0.0  # share of the limit, in the step and on the rank where it is highest
    seconds: list[float] = field(default_factory=list)  # by step, including the first
    losses: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, recipe: Any, *, rounds: int = ROUNDS) -> "Contestant":
        """A contestant with a live recipe."""
        trainer = recipe.trainer
        steps = list(itertools.islice(trainer.loader.steps(0), 1 + rounds))
        return cls(name, recipe, steps, str(trainer.micro_batches.limit))

    def figures(self) -> "Contestant":
        """What was measured, without the recipe."""
        return replace(self, recipe=None, steps=[])

    @property
    def speeds(self) -> list[float]:
        """Real tokens per second of each round."""
        return [tokens / seconds for tokens, seconds in zip(self.num_tokens, self.seconds, strict=True)][1:]

    def count(self) -> None:
        """Cut every step as training will, and count micro-steps, tokens and padding. A collective."""
        with self._cost():
            micro_batches, numbers = self.recipe.trainer.micro_batches, []
            for samples in self.steps:
                numbers.append(len(micro_batches.cut(samples)))
                micro_batches.end_step()
        self.micro_steps = fmean(numbers)
        _, padded = micro_batches.state_dict()["padding"]
        micro_batches.take_padding()
        totals = [_total(samples.rows, self.recipe._tokenizer.pad_id) for samples in self.steps]
        # Not by the training's group, which is NCCL's on a GPU and takes no tensors of the host.
        ranks = self.recipe.consensus.from_all_ranks((padded, totals))
        all_padded = sum(of_rank for of_rank, _ in ranks)
        sums = torch.tensor([of_rank for _, of_rank in ranks]).sum(0)
        self.num_samples, self.num_tokens = sums.T.tolist()
        self.padding = 1 - sum(self.num_tokens) / all_padded

    def find_peak(self) -> None:
        """Train on some steps under a meter without a limit. A collective."""
        loop, limit_bytes = loop_of(self.recipe), self.recipe.settings.memory_limit_bytes
        meter = loop.meter_for_probes()
        meter.reset()
        for samples in self.steps[:_METERED]:
            with meter:
                loop.step(self.recipe.trainer.micro_batches.cut(samples))
        self.peak = loop.consensus.max_over_ranks(meter.peak_bytes) / limit_bytes

    def train(self, place: int) -> None:
        """One optimizer step on the samples at ``place``, timed until all ranks are done. A collective."""
        with self._cost():
            seconds, result = timed_step(self.recipe, self.steps[place])
        self.seconds.append(seconds)
        self.losses.append(result.loss)

    def _cost(self) -> Any:
        return mock.patch.object(limits, "_COST_OF_MICRO_STEP", float(self.cost))


Measured = dict[int, tuple[list[Contestant], list[Contestant]]]  # by samples per step: variants, costs


def main() -> None:
    """Measure everything and write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokens", description="A token budget against rows.")
    parser.add_argument("--cost", action="store_true", help="try other weights of a micro-step too")
    options = parser.parse_args()
    _report(*measured_on_ranks(_measure, RANKS, SAMPLES_PER_STEP, options.cost))


def _measure(tiny_dir: Path, samples_per_step: Iterable[int], tries_costs: bool) -> Measured:
    return {samples: _measured(samples, tiny_dir, tries_costs) for samples in samples_per_step}


def _measured(samples: int, tiny_dir: Path, tries_costs: bool) -> tuple[list[Contestant], list[Contestant]]:
    """The variants at ``samples`` per optimizer step, and the token budget by several costs. A collective."""
    variants = [_contestant(name, samples, tiny_dir) for name in (ROWS, POWER, TOKENS)]
    dataset = variants[0].recipe.trainer.loader.dataset
    packs_per_sample = len(PackedDataset(dataset, max_seq_len=SEQ_LEN)) / len(dataset)
    variants.append(_contestant(PACKED, RANKS * round(samples * packs_per_sample / RANKS), tiny_dir))
    for one in variants:
        one.count()
        one.find_peak()
    budget = variants[VARIANTS.index(TOKENS)]
    tries_costs &= samples == SAMPLES_PER_STEP[0]
    costs = [Contestant(str(cost), budget.recipe, budget.steps, budget.limit, cost) for cost in COSTS if tries_costs]
    for one in costs:
        one.count()
    for contestants in (variants, costs):
        race(contestants)
    compare_losses([one.losses for one in (*variants[:-1], *costs)])
    return [one.figures() for one in variants], [one.figures() for one in costs]


def _contestant(name: str, samples: int, tiny_dir: Path) -> Contestant:
    """A variant of ``samples`` per optimizer step. A collective."""
    options = {"adaptive__memory_limit": LIMIT, "adaptive__global_batch_size": samples}
    options |= {"tokenizer__max_seq_len": SEQ_LEN}
    cfg = tiny_config("full", tiny_dir, tiny_dir.parent / "out", **options, **OPTIONS[name])
    return Contestant.of(name, live_recipe(cfg))


def _total(rows: Iterable[Row], pad_id: int) -> tuple[int, int]:
    """The numbers of samples and of their tokens in ``rows``; each row is a sample, or a pack that ends in padding."""
    num_samples = num_tokens = 0
    for row in rows:
        tokens, is_pack = row["tokens"], "seq_lens" in row
        num_samples += len(row["seq_lens"]) - int(tokens[-1] == pad_id) if is_pack else 1
        num_tokens += int((tokens != pad_id).sum()) if is_pack else len(tokens)
    return num_samples, num_tokens


def race(contestants: list[Contestant]) -> None:
    """Train a step of each in every round, in an order that changes from round to round. A collective."""
    for place, one in turns(contestants, 1 + ROUNDS):
        one.train(place)
        if dist.get_rank() == 0:
            print(f"round {place}: {one.name} {one.seconds[-1]:.2f} s", flush=True)


def compare_losses(losses: list[list[float]], *, tolerance: float = 1e-5) -> None:
    """Refuse losses that differ. The learning rate is 0, as in warm-up's first step, so all have the same weights.

    Raises:
        RuntimeError: the variants did not do the same work.
    """
    for of_step in zip(*losses, strict=True):
        if not all(math.isclose(loss, of_step[0], rel_tol=tolerance) for loss in of_step):
            raise RuntimeError(f"the variants had other losses, so that they did not do the same work: {of_step}")


def cells(one: Contestant, baseline: Contestant) -> list[str]:
    size = one.limit.replace("rows", f"packs of {SEQ_LEN}" if one.name == PACKED else "rows")
    figures = [f"{one.micro_steps:.1f}", f"{one.padding:.1%}", f"{median(one.speeds):.0f}"]
    return [size, *figures, spread(ratios(one, baseline))]


def ratios(one: Contestant, baseline: Contestant) -> list[float]:
    """How many times faster than the baseline, by round."""
    return [ours / theirs for ours, theirs in zip(one.speeds, baseline.speeds, strict=True)]


def _verdict(samples: int, variants: list[Contestant]) -> str:
    """Whether the project's aims are reached."""
    budget = variants[VARIANTS.index(TOKENS)]
    ratio = median(ratios(budget, variants[0]))
    padding, speed = (" (missed)" * missed for missed in (budget.padding > 0.05, ratio < 1.5))
    return f"with {samples} samples per step {budget.padding:.1%}{padding} and {ratio:.2f} times{speed}"


def _report(measured: Measured, run: dict[str, Any]) -> None:
    command = " ".join(["OMP_NUM_THREADS=1 python -m benchmarks.tokens", *sys.argv[1:]])
    header = ["samples per step", "micro-batch", "micro-steps per step", "padding", "tokens/s"]
    rows, cost_rows = [], []
    for variants, costs in measured.values():
        for one in variants:
            samples = " to ".join(str(end) for end in sorted({min(one.num_samples), max(one.num_samples)}))
            rows.append([one.name, samples, *cells(one, variants[0]), f"{one.peak:.0%}"])
        for one in costs:
            (taken,) = (other for other in costs if other.cost == TAKEN)
            cost_rows.append([one.name, str(one.num_samples[0]), *cells(one, taken)])
    verdicts = "; ".join(_verdict(samples, variants) for samples, (variants, _) in measured.items())
    lines = [
        "# A token budget against fixed rows and packs, CPU",
        "",
        provenance(command, **run),
        "",
        f"Config `tiny/full`, samples of up to {SEQ_LEN} tokens, limit {LIMIT} per rank of which 5 % are kept free;"
        " sizes are those that searches found under it. Steps are timed without the meter that keeps the limit on a"
        f" CPU, {ROUNDS} rounds of one whole optimizer step of each variant in turn. Rows are not packed but in the"
        " last variant, so that the others train on the same samples, with the same losses up to rounding.",
        "",
        f"Aims: at most 5 % padding, and 1.5 times the tokens per second of fixed rows. Measured: {verdicts}.",
        "",
        *table(["variant", *header, f"/ {ROWS}", "peak / limit"], rows),
        "",
        "Micro-batches and peaks are those of a rank, the rest is of both. Padding is a share of the tokens computed"
        " with; tokens per second are real ones, median over the rounds; ratios are taken within each round, median"
        " [quartiles]. Peaks are the highest of"
        f" {_METERED} of these steps once more, under the meter.",
        "",
        *PACKS_DIFFER,
    ]
    if cost_rows:
        lines += ["", *COST_IS, "", *table(["cost", *header, f"/ {TAKEN}"], cost_rows)]
    publish(lines, RESULTS)


if __name__ == "__main__":
    main()

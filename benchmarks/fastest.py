"""Does ``tune-adaptive fastest`` find the settings that train fastest, and what do they gain?

    OMP_NUM_THREADS=1 python -m benchmarks.fastest [--cases NAME;NAME]

Finds the fastest settings for small models on CPU processes. Then sets up every combination of the settings that it may
choose from, in an order of its own, and at last the config as it is and what was found, in turn. Prints tables and
writes them to ``results/fastest_cpu.md``.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from torchtune_adaptive.cli.fastest import planned_rows
from torchtune_adaptive.fastest.changes import Question, questions_of
from torchtune_adaptive.fastest.climb import AS_IT_IS, Climb, Outcome
from torchtune_adaptive.fastest.set_up import SetUps
from torchtune_adaptive.stock.configs import load_config, resolved
from torchtune_adaptive.tiny import make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "fastest_cpu.md"
KINDS = ("checkpointing", "resharding")  # a search on a CPU does not measure compiled code
MINUTES = 30.0
NEAR = 0.97
ROUNDS = 2  # of two set-ups, in turn

ABOUT = f"""\
`tiny/full` and `tiny/lora`, with activation checkpointing as torchtune's own configs have it, if not said otherwise.
One thread per process. *Found*: what the command chose, after *set-ups* of the recipe. *All*: a set-up of every
combination of checkpointing and resharding, each with its fastest micro-batch. *Of the best*: the rate of what was
found to that of the best combination, if that is another one the median of {ROUNDS} pairs of set-ups that took turns.
*Times as it is*: tokens per second of what was found to those of the config as it is, by such pairs too. *Each alone*:
every micro-batch of every combination in a process of its own, as DeepSpeed's autotuner tries them; its seconds are the
sum of what starting, without a search, and timing took in the second pass. *Out of memory*: seconds of a set-up of
which not one row fits, where the plan was not asked.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A config with other values, on ``ranks`` processes with ``samples`` per optimizer step."""

    config: str = "tiny/full"
    ranks: int = 1
    samples: int = 16
    changes: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "full": Case(),
    "full, 8 samples": Case(samples=8),
    "full, no checkpointing": Case(changes={"enable_activation_checkpointing": False}),
    # Not one row fits without checkpointing.
    "full, 32 MiB": Case(changes={"adaptive.memory_limit": "32MiB", "batch_size": 1}),
    "full, equal rows": Case(changes={"dataset.packed": True}),
    "full, 2 ranks": Case(ranks=2),
    "full, 2 ranks, 8 samples": Case(ranks=2, samples=8),
    "LoRA": Case(config="tiny/lora"),
    "LoRA, 8 samples": Case(config="tiny/lora", samples=8),
    "LoRA, 2 ranks": Case(config="tiny/lora", ranks=2),
}


@dataclass(frozen=True)
class Result:
    """What was found for a case, and what all combinations and the pairs showed.

    Attributes:
        alone: seconds of each micro-batch of each combination, if it had a process of its own.
        pairs: the config as it is and what was found, set up in turn.
        beside_best: what was found and the best combination, set up in turn if they differ.
    """

    name: str
    climb: Climb
    everything: Sequence[Outcome]
    alone: Sequence[float]
    pairs: Sequence[tuple[Outcome, Outcome]]
    beside_best: Sequence[tuple[Outcome, Outcome]]

    @property
    def of_the_best(self) -> float:
        """The rate of what was found as a fraction of the best."""
        if self.beside_best:
            return median(found.timing.rate / best.timing.rate for found, best in self.beside_best)
        same = best_of(self.everything)
        return same.timings.get(self.climb.best.micro_batch, same.timing).rate / fastest(same)

    @property
    def gain(self) -> float:
        """Tokens per second of what was found, to those of the config as it is."""
        return median(found.timing.rate / next(iter(own.timings.values())).rate for own, found in self.pairs)

    def row(self) -> list[str]:
        """The cells of the table."""
        best, set_ups = self.climb.best, sum(bool(one.seconds) for one in self.climb.outcomes)
        found = f"{best.words}, {best.micro_batch}"
        own = next(iter(self.climb.outcomes[0].timings))
        seconds = sum(one.seconds for one in self.climb.outcomes)
        figures = [f"{self.gain:.2f}", f"{self.of_the_best:.1%}", str(set_ups), f"{seconds:.0f}"]
        all_seconds = sum(one.seconds for one in self.everything)
        others = [str(len(self.everything)), f"{all_seconds:.0f}", str(len(self.alone)), f"{sum(self.alone):.0f}"]
        failed = [f"{one.seconds:.0f}" for one in self.everything if not one.timings]
        return [self.name, own, found, *figures, *others, ", ".join(failed) or "-"]


def result_of(name: str, case: Case, tiny_dir: Path, directory: Path) -> Result:
    """Find the fastest settings of a case, and measure all others."""
    cfg = load_config(case.config, [f"tiny_dir={tiny_dir}", f"output_dir={directory}"])
    OmegaConf.set_struct(cfg, False)
    usual = {"enable_activation_checkpointing": True, "adaptive.memory_limit": "1GiB", "tokenizer.max_seq_len": 128}
    for key, value in (usual | dict(case.changes)).items():
        OmegaConf.update(cfg, key, value, merge=False)
    method = "lora" if "lora" in case.config else "full"
    recipe = f"adaptive_{method}_finetune_distributed"
    set_ups = SetUps(["--nproc_per_node", str(case.ranks)], recipe, cfg, case.samples, directory)

    def plan(values: Mapping[str, Any]) -> int | None:
        return planned_rows(set_ups.config(values), case.ranks, set_ups.search_of(climb.best))

    climb = Climb(set_ups.measure, plan, 60 * MINUTES)
    questions = questions_of(DictConfig(resolved(cfg)), recipe=recipe, ranks=case.ranks, kinds=KINDS)
    climb.run(questions)
    best = climb.best
    everything, alone = list[Outcome](), list[float]()
    for number, values in enumerate(combinations(questions)):
        everything.append(set_ups.measure(f"{number}", values))
        alone += alone_s(everything[-1], set_ups)
    pairs = [(set_ups.measure(AS_IT_IS, {}), set_ups.measure(best.words, best.values)) for _ in range(ROUNDS)]
    other = best_of(everything)
    # The best of many single measurements is often a lucky one.
    beside_best = [
        (set_ups.measure(best.words, best.values), set_ups.measure(other.words, other.values))
        for _ in range(ROUNDS if dict(other.values) != dict(best.values) else 0)
    ]
    return Result(name, climb, everything, alone, pairs, beside_best)


def best_of(outcomes: Sequence[Outcome]) -> Outcome:
    """The combination with the fastest micro-batch."""
    return max((one for one in outcomes if one.timings), key=fastest)


def fastest(outcome: Outcome) -> float:
    """Tokens per second of its fastest micro-batch."""
    return max(timing.rate for timing in outcome.timings.values())


def alone_s(outcome: Outcome, set_ups: SetUps) -> list[float]:
    """Seconds of each micro-batch of a set-up, if it were timed in a process of its own, without a search."""
    if not outcome.timings:
        return [outcome.seconds]
    timed = [sum(timing.seconds) for timing in outcome.timings.values()]
    probes = set_ups.search_of(outcome).result.probes
    start = outcome.seconds - sum(timed) - sum(probe.seconds for probe in probes)
    return [start + seconds for seconds in timed]


def combinations(questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """The values of every combination of alternatives, none of them included, the heaviest first."""
    for chosen in itertools.product(*([None, *question.alternatives] for question in reversed(questions))):
        yield {key: value for change in reversed(chosen) if change for key, value in change.values.items()}


def _report(results: Sequence[Result], output: Path, *, seconds: float, load: float) -> None:
    near = sum(one.of_the_best >= NEAR for one in results)
    gain = median(one.gain for one in results)
    header = ["case", "as it is", "found", "times as it is", "of the best", "set-ups", "s", "all", "s", "each alone"]
    publish(
        output,
        "The fastest step that fits",
        provenance("OMP_NUM_THREADS=1 python -m benchmarks.fastest", seconds=seconds, load=load),
        ABOUT,
        f"Of {len(results)} cases {near} are within {1 - NEAR:.0%} of the best; the median gain is {gain:.2f}.",
        table([*header, "s", "out of memory"], (one.row() for one in results)),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    started, load, results = time.perf_counter(), os.getloadavg()[0], list[Result]()
    with tempfile.TemporaryDirectory() as folder:
        tiny_dir = Path(folder) / "tiny"
        make_tiny_assets(tiny_dir, num_samples=960)
        for name in tqdm(arguments.cases.split(";"), desc="cases"):
            results.append(result_of(name, CASES[name], tiny_dir, Path(folder) / name.replace(" ", "_")))
            print(*results[-1].row(), sep=" | ", file=sys.stderr)
            # After each case, as a run takes half an hour.
            _report(results, arguments.output, seconds=time.perf_counter() - started, load=load)


if __name__ == "__main__":
    main()

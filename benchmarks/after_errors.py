"""What does training lose after an out-of-memory error? Rows of very different lengths, and a neighbour on the GPU.

    OMP_NUM_THREADS=1 python -m benchmarks.after_errors

Two CPU ranks with FSDP2. The loops train on the same samples and take turns in each step, so that other load on the
machine affects all equally. A micro-batch with more tokens than fit fails at the end of its forward pass. All must end
with the same parameters, except for rounding; if not, the exit status is 1. Writes tables to
``results/after_errors_cpu.md``, and ``docs/images/after_errors.svg``.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence

from benchmarks.on_ranks import measured_on_ranks, no_assets
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.plain_loops import finish_step, own_shards
from torchtune_adaptive import MemoryEvent, RecoverableStep
from torchtune_adaptive.engine.recovery.attempts import MemoryPressure
from torchtune_adaptive.engine.recovery.backoff import NOT_IN_THIS_EPOCH, Backoff
from torchtune_adaptive.testing import out_of_memory

RESULTS = Path(__file__).parent / "results" / "after_errors_cpu.md"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "after_errors.svg"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.after_errors"
RANKS, ROWS, MICRO_BATCH = 2, 16, 4
WIDTH, LAYERS, VOCABULARY = 96, 3, 64
STEPS = 2000
SHARE_ABOVE = 1 / 200  # of the steps, which have a micro-batch that does not fit
NEIGHBOUR_STEPS, TAKEN = 300, range(100, 150)  # steps of the second part; those in which half of the memory is taken
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 48, 0.6, 512
ENOUGH, OURS, HALVES = "enough memory", "this package", "halved for good"
_ROUNDING = 1e-5  # of parameters; AdamW may change one by ten times as much in a single step
VARIANTS = (ENOUGH, OURS, HALVES)


class Never(Backoff):
    """A micro-batch that was halved never grows again within an epoch."""

    def failed(self, size: int, *, step: int, first_wait: int = 1) -> None:
        super().failed(size, step=step, first_wait=first_wait)
        self.next_trial = NOT_IN_THIS_EPOCH


@dataclass
class Seen:
    """What happened in each step of a loop: its seconds, the rows and tokens of the largest micro-batch, padding."""

    seconds: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    padded_tokens: int = 0
    repeated: list[int] = field(default_factory=list)


def num_tokens(rows: Sequence[torch.Tensor]) -> int:
    """Tokens of a micro-batch with padding."""
    return len(rows) * max(map(len, rows))


class Loop:
    """A plain loop over ``RecoverableStep``. A collective."""

    def __init__(self, variant: str) -> None:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(LAYERS)
        ]
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
        for module in (*blocks, self.model):
            fully_shard(module)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.capacity: float = float("inf")
        self.seen = Seen()
        self._tried: list[tuple[int, int]] = []  # rows and tokens of the micro-batches of a step
        self.step: RecoverableStep[tuple[torch.Tensor, int]] = RecoverableStep(
            self.model,
            self._micro_step,
            micro_batch_size=MICRO_BATCH,
            optimizer=self._optimizer,
            on_event=self._on_event,
        )
        if variant == HALVES:
            self.step.backoff = Never()

    def train(self, rows: list[torch.Tensor]) -> None:
        """One optimizer step."""
        began = time.perf_counter()
        self._tried.clear()
        loss_sum, num_samples = self.step(rows)
        finish_step(self.model, self._optimizer, loss_sum, num_samples)
        self.seen.seconds.append(time.perf_counter() - began)
        self.seen.rows.append(max(number for number, _ in self._tried))
        self.seen.padded_tokens += sum(tokens for _, tokens in self._tried)

    def _micro_step(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        self._tried.append((len(rows), num_tokens(rows)))
        tokens = pad_sequence(rows, batch_first=True)
        logits = self.model(tokens)
        if self._tried[-1][1] > self.capacity:
            out_of_memory()
        own = torch.stack(
            [F.cross_entropy(logits[index, : len(row)], tokens[index, : len(row)]) for index, row in enumerate(rows)]
        )
        own.sum().backward()
        return own.sum().detach(), len(rows)

    def _on_event(self, event: MemoryEvent) -> None:
        if event.pressure is MemoryPressure.OUT_OF_MEMORY:
            self._tried.clear()
            self.seen.repeated.append(event.step)


def _samples(steps: int) -> Iterator[list[torch.Tensor]]:
    """The rows of each step of this rank, with log-normal lengths."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    for _ in range(steps):
        lengths = MEDIAN_TOKENS * torch.exp(SIGMA * torch.randn(ROWS, generator=generator))
        yield [
            torch.randint(VOCABULARY, (length,), generator=generator)
            for length in lengths.round().long().clamp(2, MOST_TOKENS).tolist()
        ]


def _largest(rows: list[torch.Tensor]) -> int:
    """Tokens of the largest micro-batch of all ranks."""
    sizes = [num_tokens(rows[start : start + MICRO_BATCH]) for start in range(0, ROWS, MICRO_BATCH)]
    largest = torch.tensor(max(sizes))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


@dataclass
class Outcome:
    """A part of the benchmark, as rank 0 has seen it."""

    capacity: int
    above: int  # steps with a micro-batch that does not fit
    tokens: list[int]  # of each step on this rank
    seen: dict[str, Seen]
    rounding: dict[str, float]  # the largest difference between parameters and those with enough memory


def _train(steps: int, taken: range = range(0)) -> Outcome:
    """Train all loops on the same samples. A neighbour takes half of rank 1's memory in the steps ``taken``."""
    largest = sorted(_largest(rows) for rows in _samples(steps))
    above = 0 if taken else round(steps * SHARE_ABOVE)
    capacity = largest[-above - 1]
    loops = {variant: Loop(variant) for variant in VARIANTS}
    tokens = []
    for number, rows in enumerate(_samples(steps)):
        tokens.append(sum(map(len, rows)))
        for place in range(len(VARIANTS)):
            variant = VARIANTS[(number + place) % len(VARIANTS)]
            if variant != ENOUGH:
                is_taken = dist.get_rank() == 1 and number in taken
                loops[variant].capacity = capacity / 2 if is_taken else capacity
            loops[variant].train(rows)
    expected = own_shards(loops[ENOUGH].model)
    rounding = {
        variant: max(
            (one - other).abs().max().item() for one, other in zip(own_shards(loop.model), expected, strict=True)
        )
        for variant, loop in loops.items()
    }
    return Outcome(capacity, above, tokens, {variant: loop.seen for variant, loop in loops.items()}, rounding)


def _measure(_: Path) -> tuple[Outcome, Outcome]:
    return _train(STEPS), _train(NEIGHBOUR_STEPS, TAKEN)


def main() -> None:
    """Measure, write the tables and draw the picture."""
    (long_rows, neighbour), run = measured_on_ranks(_measure, RANKS, make_assets=no_assets)
    draw(neighbour, PICTURE)
    _report(long_rows, neighbour, run)
    sys.exit(not all(apart <= _ROUNDING for outcome in (long_rows, neighbour) for apart in outcome.rounding.values()))


def _rate(outcome: Outcome, variant: str, first: int) -> float:
    """Tokens per second from step ``first`` on, from 0, against the loop with enough memory."""
    seconds = {one: sum(outcome.seen[one].seconds[first:]) for one in (variant, ENOUGH)}
    return seconds[ENOUGH] / seconds[variant]


def _rows(outcome: Outcome) -> list[list[str]]:
    rows = []
    for variant, seen in outcome.seen.items():
        first = seen.repeated[0] if seen.repeated else 0
        padding = 1 - sum(outcome.tokens) / seen.padded_tokens
        whole = sum(number == MICRO_BATCH for number in seen.rows) / len(seen.rows)
        cells = [variant, f"{_rate(outcome, variant, first):.3f}", str(len(seen.repeated)), f"{whole:.1%}"]
        rows.append([*cells, f"{padding:.1%}", f"{outcome.rounding[variant]:.0e}"])
    return rows


def draw(outcome: Outcome, path: Path) -> None:
    """Draw the rows of the largest micro-batch over the steps."""
    colours = {OURS: "#0072B2", HALVES: "#D55E00"}
    with mpl.rc_context({"svg.hashsalt": "after_errors", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(7.2, 2.4), layout="constrained")
        axes = figure.subplots()
        axes.axvspan(TAKEN.start + 1, TAKEN.stop, color="#E6E6E6", label="a neighbour takes half of the memory")
        for shift, (variant, colour) in enumerate(colours.items()):
            steps = range(1, len(outcome.seen[variant].rows) + 1)
            axes.step(steps, [rows - 0.04 * shift for rows in outcome.seen[variant].rows], color=colour, label=variant)
        axes.set(xlabel="optimizer step", ylabel="rows per micro-batch", ylim=(0, MICRO_BATCH + 0.5))
        axes.legend(loc="lower right", fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


def _report(long_rows: Outcome, neighbour: Outcome, run: dict[str, Any]) -> None:
    header = ["after an error", "speed / enough memory", "repeated steps", "steps with whole micro-batches", "padding"]
    header += ["largest difference of parameters"]
    setting = (
        f"A model of linear layers under FSDP2, {ROWS} rows per rank and step in micro-batches of {MICRO_BATCH}, AdamW."
        f" Lengths are log-normal, with a median of {MEDIAN_TOKENS} tokens and a sigma of {SIGMA}. A micro-batch with"
        " more tokens than fit fails at the end of its forward pass. All loops take turns in each step on the same"
        " samples. *Speed*: tokens per second from the step after the first error on, as a ratio within this run."
        f" *Whole micro-batches*: the largest one of rank 0 has {MICRO_BATCH} rows. *Halved for good*: until the epoch"
        " ends."
    )
    lines = [
        "# After an out-of-memory error, CPU",
        "",
        provenance(COMMAND, **run),
        "",
        setting,
        "",
        f"## {STEPS} steps, of which {long_rows.above} have a micro-batch above {long_rows.capacity} tokens",
        "",
        *table(header, _rows(long_rows)),
        "",
        f"## {NEIGHBOUR_STEPS} steps; in steps {TAKEN.start + 1} to {TAKEN.stop} half of rank 1's memory is taken",
        "",
        *table(header, _rows(neighbour)),
        "",
        f"Repeated steps of `{OURS}`: {', '.join(map(str, neighbour.seen[OURS].repeated))}.",
    ]
    publish(lines, RESULTS)


if __name__ == "__main__":
    main()

"""The document: a table for each case, the contestants that beat the default, and the choices that matter."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.peers.data import NUM_ROWS
from benchmarks.peers.task import STEPS
from benchmarks.peers.watch import Found
from benchmarks.tables import table

HEADER = (
    "tool",
    "size found",
    "largest that fits",
    "full steps",
    "OOMs",
    "search, s",
    "of it collecting garbage, s",
    "times ours",
    "changed",
    f"survives {STEPS} steps",
)

ON_CPU = (
    "The card of the peers counts the bytes that our meter counts and raises what CUDA raises. It sees an operation's"
    " output after the operation has run: where a size is far too large, the CPU has done work that a GPU would have"
    " refused, which lengthens the search of those that begin far above the limit. Times are the CPU's; on a GPU the"
    " share of steps, restarts and garbage differs."
)
ON_SIMULATED_GPU = (
    "[The simulated GPU](../../tests/simulated_gpu/README.md) is torch for CUDA, and memory runs out as on a GPU: when"
    " the caching allocator gets no more of it. Nobody has set a limit, and each search has the whole device. Kernels"
    " take no time and compute nothing: a search's seconds are those of Python, of the launches, and of garbage"
    " collections, and whether values have changed is not computed."
)
NOTES = (
    "Each tool runs in a process of its own, which first takes two steps of another model; the order turns from"
    " round to round. Seconds are the median with [least, most] of the rounds; where another cell differed from round"
    " to round, all its values are given.",
    "Largest that fits: three steps in a row of that many rows of the greatest length, every size tried from 1 (on the"
    " simulated GPU from what a bisection finds) until three beyond the largest. The limits are round numbers whose"
    " largest size is neither a power of two nor on accelerate's ladder 128, 115, 103, ... down by tenths (on the CPU"
    " 100MiB stands for 96MiB, whose 25 is).",
    "Full steps: optimizer steps completed in the search. Changed: bits of parameters, buffers, optimizer state or"
    " random generators that differ between the state before the search and the state that training begins with.",
    "A search that trains (accelerate, HF Trainer, toma, the RFC's first sketch) is over when its last attempt begins;"
    " what this one does is training. accelerate makes seed, model and optimizer again in each attempt, as its example"
    " does, so that nothing of an earlier one is left.",
    "ours: `make_batch` gives rows of the greatest length, as its documentation asks for; all others meet the data's"
    " own rows (in their order; the HF Trainer shuffles), each batch padded to its longest row. Margin 0.05 is of the"
    " memory; Lightning's 0.05, in binsearch only, is of the rows. All strategies train in a plain loop afterwards, but"
    " for the one that trains with `RecoverableStep`. On CUDA our search has the allocator's cache emptied before the"
    ' first optimizer step, which creates the state; the trials of "largest that fits" do not, so more may train.'
    " Expandable segments are torch's setting `PYTORCH_ALLOC_CONF=expandable_segments:True`.",
    "Lightning: `Tuner.scale_batch_size` with its defaults (2 rows first, 3 steps per trial), then `fit` by the same"
    " trainer. accelerate: starting size 128, its default. HF Trainer: `per_device_train_batch_size=128`, its own"
    " defaults except for the optimizer, which is the same for all. toma: `initial_batchsize=512` as in its"
    " documentation, around the train step, with its default cache, whose key holds the machine's free memory in steps"
    " of 256 MiB: other processes can make it forget, and begin from 512 again. RFC 2199: three sketches, written"
    " again without rounding down to a power of two; the third reads what is allocated after the forward pass, while"
    " the activations are there.",
)


@dataclass
class Measured:
    """What every contestant found in a case, round by round; the exhaustive search is made once, or not at all."""

    name: str
    limit: str
    found: dict[str, list[Found]]
    exact: Found = field(default_factory=Found)


def document(
    cases: Sequence[Measured], *, place: str, geometry: Mapping[str, Any], default: str, provenance: str
) -> list[str]:
    """The lines of the whole document. ``default`` is the contestant whose seconds others are compared with."""
    lines = [
        f"# The search against its peers, {place}",
        "",
        provenance,
        "",
        f"A Llama ({', '.join(f'{name} {value}' for name, value in geometry.items())}), AdamW, fp32, {NUM_ROWS} rows of"
        " random tokens.",
    ]
    for case in cases:
        exact = "not tried" if not case.exact.size else str(case.exact.size)
        ours = [one.seconds for one in case.found[default] if not one.error]
        rows = [_row(name, found, exact, ours) for name, found in case.found.items() if found]
        lines += ["", f"## {case.name}, limit {case.limit}", "", *table(HEADER, rows)]
    notes = [*NOTES[:1], ON_CPU if place == "CPU" else ON_SIMULATED_GPU, *NOTES[1:]]
    return [*lines, "", "## What was chosen", "", *(f"- {note}" for note in notes)]


def _row(name: str, found: Sequence[Found], exact: str, ours: Sequence[float]) -> list[str]:
    errors = [one.error for one in found if one.error]
    if errors:
        return [name, "**failed**", exact, "", "", "", "", "", "", errors[0].replace("|", "/")]

    def cell(what: Callable[[Found], Any]) -> str:
        return _differing(what(one) for one in found)

    seconds = [one.seconds for one in found]
    return [
        name,
        cell(lambda one: one.size),
        exact,
        cell(lambda one: one.steps),
        cell(lambda one: one.ooms),
        f"{median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]",
        f"{median(one.gc_seconds for one in found):.2f}",
        f"{median(seconds) / median(ours):.1f}" if ours else "",
        cell(lambda one: "not computed" if one.changed is None else ", ".join(one.changed) or "nothing"),
        cell(lambda one: one.survives),
    ]


def _differing(values: Iterable[Any]) -> str:
    """Each value once, in the rounds' order."""
    return " / ".join(dict.fromkeys(map(str, values)))

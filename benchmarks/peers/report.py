"""The document: a table for each case, the contestants that beat the default, and the choices that matter."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.peers.data import NUM_ROWS
from benchmarks.peers.task import GEOMETRY, STEPS
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
    "changed",
    f"survives {STEPS} steps",
)

NOTES = (
    "Each tool runs in a process of its own, which first takes two steps of another model; the order turns from"
    " round to round. Seconds are the median with [least, most] of the rounds; where another cell differed from round"
    " to round, all its values are given.",
    "The card of the peers counts the bytes that our meter counts and raises what CUDA raises. It sees an operation's"
    " output after the operation has run: where a size is far too large, the CPU has done work that a GPU would have"
    " refused, which lengthens the search of those that begin far above the limit. Times are the CPU's; on a GPU the"
    " share of steps, restarts and garbage differs.",
    "Largest that fits: three steps in a row of that many rows of the greatest length, every size tried from 1 until"
    " three beyond the largest. The limits are round numbers whose largest size is neither a power of two nor on"
    " accelerate's ladder 128, 115, 103, ... down by tenths (100MiB stands for 96MiB, whose 25 is).",
    "Full steps: optimizer steps completed in the search. Changed: bits of parameters, buffers, optimizer state or"
    " random generators that differ between the state before the search and the state that training begins with.",
    "A search that trains (accelerate, HF Trainer, toma, the RFC's first sketch) is over when its last attempt begins;"
    " what this one does is training. accelerate makes seed, model and optimizer again in each attempt, as its example"
    " does, so that nothing of an earlier one is left.",
    "ours: `make_batch` gives rows of the greatest length, as its documentation asks for; all others meet the data's"
    " own rows (in their order; the HF Trainer shuffles), each batch padded to its longest row. Margin 0.05 is of the"
    " memory; Lightning's 0.05, in binsearch only, is of the rows.",
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


def document(cases: Sequence[Measured], *, default: str, provenance: str) -> list[str]:
    """The lines of the whole document. ``default`` is the contestant whom others are compared with."""
    geometry = ", ".join(f"{name} {value}" for name, value in GEOMETRY.items())
    lines = [
        "# The search against its peers, CPU",
        "",
        provenance,
        "",
        f"A Llama ({geometry}), AdamW, fp32, {NUM_ROWS} rows of random tokens.",
    ]
    for case in cases:
        exact = "not tried" if not case.exact.size else str(case.exact.size)
        rows = [_row(name, found, exact) for name, found in case.found.items() if found]
        lines += ["", f"## {case.name}, limit {case.limit}", "", *table(HEADER, rows), "", _compared(case, default)]
    return [*lines, "", "## What was chosen", "", *(f"- {note}" for note in NOTES)]


def _row(name: str, found: Sequence[Found], exact: str) -> list[str]:
    errors = [one.error for one in found if one.error]
    if errors:
        return [name, "**failed**", exact, "", "", "", "", "", errors[0].replace("|", "/")]

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
        cell(lambda one: ", ".join(one.changed) or "nothing"),
        cell(lambda one: one.survives),
    ]


def _compared(case: Measured, default: str) -> str:
    """The contestants that beat ``default``, in words: in time, in full steps or in rows, and whether these survive."""
    done = {name: found for name, found in case.found.items() if found and not any(one.error for one in found)}
    if default not in done:
        return f"{default} failed."
    mine = done.pop(default)
    own = f"{default}: {_rows(mine)} rows in {_seconds(mine):.2f} s and {_steps(mine)} full steps"
    quicker = [
        f"{name} ({_seconds(found):.2f} s, {_rows(found)} rows)"
        for name, found in done.items()
        if _seconds(found) < _seconds(mine)
    ]
    fewer_steps = [
        f"{name} ({_steps(found)}, and {_ooms(found)} OOMs)"
        for name, found in done.items()
        if _steps(found) < _steps(mine)
    ]
    more_rows = [
        f"{name} ({_rows(found)}; survives: {_differing(one.survives for one in found)})"
        for name, found in done.items()
        if _rows(found) > _rows(mine)
    ]
    before_us = {"In less time": quicker, "In fewer full steps": fewer_steps, "More rows": more_rows}
    return ". ".join([own, *(f"{what}: {'; '.join(names) or 'none'}" for what, names in before_us.items())]) + "."


def _rows(found: Sequence[Found]) -> int:
    return max(one.size for one in found)


def _seconds(found: Sequence[Found]) -> float:
    return median(one.seconds for one in found)


def _steps(found: Sequence[Found]) -> int:
    return min(one.steps for one in found)


def _ooms(found: Sequence[Found]) -> int:
    return min(one.ooms for one in found)


def _differing(values: Iterable[Any]) -> str:
    """Each value once, in the rounds' order."""
    return " / ".join(dict.fromkeys(map(str, values)))

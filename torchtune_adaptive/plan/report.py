"""A plan as text and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torchtune_adaptive.plan.host_memory import HostPlan
from torchtune_adaptive.plan.overhead import Overhead
from torchtune_adaptive.plan.peak_modules import step_json
from torchtune_adaptive.plan.plan import LengthPlan, Plan, SizePlan
from torchtune_adaptive.plan.step_events import StepEvents
from torchtune_adaptive.plan.suggestions import Suggestion
from torchtune_adaptive.plan.what_if import AS_IT_IS
from torchtune_adaptive.text import byte_unit, format_bytes, text_table

_GIB = 2**30


def plan_text(plan: Plan, *, title: str) -> str:
    """Tables of the batch sizes, of each phase's peak and of the kinds of bytes at the highest peak."""
    step = plan.step
    layers = " and ".join(map(str, step.traced_layers))
    traced = "" if step.traced_layers == (step.num_layers,) else f", extrapolated from models of {layers} layers"
    trained = _count(step.num_parameters - step.num_frozen_parameters)
    frozen = f"; {_count(step.num_frozen_parameters)} in a frozen model" if step.num_frozen_parameters else ""
    asked = [size for length in plan.lengths for size in length.asked]
    shown = asked or plan.lengths
    lines = [
        f"{title}: {trained} parameters in {step.num_layers} layers{traced}{frozen}",
        f"{_ranks(plan.world_size)} of {format_bytes(plan.card.memory_bytes)},"
        f" of which a fraction of {plan.margin:g} is held back",
        "",
        text_table([_SIZES, *map(_sizes, plan.lengths)]),
        "",
        *(["Of the batches asked for:", text_table([_ASKED, *map(_asked, asked)]), ""] if asked else []),
        "Traced peak of each phase, in GiB:",
        text_table(_in_gib([(size, size.phases) for size in shown])),
        "",
        "What the highest of them holds, in GiB:",
        text_table(_in_gib([(size, size.kinds) for size in shown])),
        "",
        *_host(plan.host),
        "",
        _source(plan),
    ]
    if step.paged_bytes:
        paged = format_bytes(step.paged_bytes)
        lines.append(f"Optimizer state of {paged} is in paged memory, which can move to the host: not counted.")
    return "\n".join(lines)


def grid_text(plans: Mapping[str, Sequence[Plan]], *, title: str) -> str:
    """The largest batch on each GPU, by its name, and number of ranks, and how many ranks of each GPU it takes.

    If batches were asked for, whether they fit.

    Args:
        plans: of each GPU, for the same numbers of ranks.
    """
    (first, *_), *_ = plans.values()
    lengths = [length.seq_len for length in first.lengths]
    rows = [[name, str(one.world_size), *map(_in_short, one.lengths)] for name, row in plans.items() for one in row]
    what = "which batches per rank fit" if first.lengths[0].asked else "largest batch per rank, and the one used"
    lines = [
        f"{title}: {what}",
        "",
        text_table([["GPU", "ranks", *(f"rows of {tokens}" for tokens in lengths)], *rows]),
        "",
        *(_fewest_ranks(plans, place) for place in range(len(lengths))),
        "",
        *_sources([one for row in plans.values() for one in row]),
    ]
    return "\n".join(lines)


def _in_short(length: LengthPlan) -> str:
    if length.asked:
        return ", ".join(f"{size.batch_size} {size.fits}" for size in length.asked)
    return "none" if length.exact_batch_size == 0 else f"{_size(length.exact_batch_size)} ({length.batch_size})"


def _fewest_ranks(plans: Mapping[str, Sequence[Plan]], place: int) -> str:
    """On how many ranks of each GPU rows of one length fit, of the numbers that were planned."""
    (first, *_), *_ = plans.values()
    what = f"Rows of {first.lengths[place].seq_len} tokens"
    fewest = {
        name: min(fitting)
        for name, row in plans.items()
        if (fitting := [one.world_size for one in row if one.lengths[place].exact_batch_size != 0])
    }
    if not fewest:
        return f"{what} fit on none of these."
    enough = [f"{_ranks(number)} of {name}" for name, number in fewest.items()]
    return f"{what} need at least {', or '.join(enough)}."


def suggestion_text(suggestion: Suggestion) -> str:
    """One line that says what fits after the change."""
    length = suggestion.length
    if length is None:
        return f"{suggestion.change}: not planned, {suggestion.refused}"
    if length.exact_batch_size == 0:
        needed = format_bytes(length.process_bytes)
        return f"{suggestion.change}: does not fit either, one row of {length.seq_len} tokens would need {needed}"
    return f"{suggestion.change}: largest batch_size {_size(length.exact_batch_size)} (rows of {length.seq_len} tokens)"


def what_if_text(effects: Iterable[Suggestion]) -> str:
    """What each change saves at the config's own batch, the one that saves most first."""
    effects = list(effects)
    planned = [(effect.change, effect.length) for effect in effects if effect.length is not None]
    needed = {change: length.asked[0].process_bytes for change, length in planned}
    planned.sort(key=lambda pair: needed[pair[0]])
    unit, unit_bytes = byte_unit(max(needed.values()))
    rows = [
        [
            change,
            f"{needed[change] / unit_bytes:.2f}",
            f"{round((needed[AS_IT_IS] - needed[change]) / unit_bytes, 2) + 0.0:.2f}",
            length.asked[0].fits,
            _size(length.exact_batch_size),
        ]
        for change, length in planned
    ]
    size = planned[0][1].asked[0]
    refused = [f"- {effect.change}: not planned, {effect.refused}" for effect in effects if effect.length is None]
    lines = [
        f"With a batch of {size.batch_size} rows of {size.seq_len} tokens, in {unit}:",
        text_table([["change", "process", "saved", "fits", "largest batch"], *rows]),
    ]
    return "\n".join([*lines, "", *refused] if refused else lines)


def plan_json(
    plan: Plan,
    suggestions: Iterable[Suggestion],
    effects: Iterable[Suggestion] = (),
    events: StepEvents | None = None,
) -> dict[str, Any]:
    """The plan, its suggestions, effects of changes, and the modules of a step that was traced whole, if one was.

    All are values that JSON can hold; bytes are those of one rank.
    """
    step = plan.step
    return {
        "world_size": plan.world_size,
        "memory_bytes": plan.card.memory_bytes,
        "margin": plan.margin,
        "num_parameters": step.num_parameters,
        "num_frozen_parameters": step.num_frozen_parameters,
        "num_layers": step.num_layers,
        "traced_layers": list(step.traced_layers),
        "paged_bytes": step.paged_bytes,
        "overhead": asdict(plan.overhead),
        "host": asdict(plan.host) | {"peak_bytes": plan.host.peak_bytes},
        "lengths": _in_whole_bytes([asdict(length) for length in plan.lengths]),
        "suggestions": _in_whole_bytes([asdict(suggestion) for suggestion in suggestions]),
        "what_if": _in_whole_bytes([asdict(effect) for effect in effects]),
        "step": None if events is None else step_json(events),
    }


def _in_whole_bytes(value: Any) -> Any:
    """The value with every fraction in it rounded: of the figures of a size only bytes have fractions."""
    if isinstance(value, dict):
        return {key: _in_whole_bytes(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_in_whole_bytes(one) for one in value]
    return round(value) if isinstance(value, float) else value


_BYTES = ("traced", "allocated", "reserved", "process", "give or take")
_SIZES = ("rows of", "largest batch", "at least", "used", "tokens per step", *_BYTES)
_ASKED = ("rows of", "batch", "fits", "tokens per step", *_BYTES)


def _sizes(length: LengthPlan) -> list[str]:
    sizes = [_size(length.exact_batch_size), _size(length.certain_batch_size)]
    used = str(length.batch_size) if length.exact_batch_size != 0 else f"({length.batch_size})"
    return [f"{length.seq_len}", *sizes, used, f"{length.tokens_per_step:,}", *_bytes(length)]


def _asked(size: SizePlan) -> list[str]:
    return [f"{size.seq_len}", f"{size.batch_size}", size.fits, f"{size.tokens_per_step:,}", *_bytes(size)]


def _bytes(size: SizePlan) -> list[str]:
    figures = size.peak_bytes, size.allocated_bytes, size.reserved_bytes, size.process_bytes, size.uncertainty_bytes
    return list(map(format_bytes, figures))


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _size(batch_size: int | None) -> str:
    return "any" if batch_size is None else str(batch_size)


def _in_gib(rows: Sequence[tuple[SizePlan, dict[str, float]]]) -> list[list[str]]:
    """The rows of a table with a column for each of the figures."""
    names = ["rows of", "batch", *rows[0][1]]
    return [names] + [
        [str(size.seq_len), str(size.batch_size), *(f"{num_bytes / _GIB:.2f}" for num_bytes in figures.values())]
        for size, figures in rows
    ]


def _sources(plans: Sequence[Plan]) -> list[str]:
    """What the GPU adds, once for all plans for which that is the same, by their numbers of ranks if it is not."""
    ranks: dict[str, set[int]] = {}
    for one in plans:
        ranks.setdefault(_source(one), set()).add(one.world_size)
    if len(ranks) == 1:
        return list(ranks)
    return [
        f"On {', '.join(map(str, sorted(numbers)))} rank{'s' if numbers != {1} else ''}: {said}"
        for said, numbers in ranks.items()
    ]


def _host(host: HostPlan) -> list[str]:
    """Host memory of a machine, by what a run does."""
    table = [["what", *host.tensor_bytes], ["tensors", *(f"{held / _GIB:.2f}" for held in host.tensor_bytes.values())]]
    together = [host.process_bytes + held for held in host.tensor_bytes.values()]
    table.append(["with processes", *(f"{num_bytes / _GIB:.2f}" for num_bytes in together)])
    return [
        f"Host memory of a machine with {_ranks(host.ranks)}, in GiB:",
        text_table(table),
        "",
        f"At most {format_bytes(host.peak_bytes)}. Checkpoint files ({format_bytes(host.file_bytes)}) are in the page"
        " cache, which can be taken back. `search again` is for resumed runs, and after an out-of-memory error.",
    ]


def _source(plan: Plan) -> str:
    overhead = plan.overhead
    if overhead == Overhead.none():
        return "On a CPU nothing is added to what is traced."
    return (
        f"What the GPU adds is not traced ({overhead.source}): outside the allocator"
        f" {format_bytes(overhead.outside_bytes)}, workspaces {format_bytes(overhead.workspace_bytes)}, attention"
        f" {overhead.bytes_per_token:.0f} bytes per token, fragmentation {overhead.fragmentation:.0%}."
    )

"""A plan as text and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

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
        _device(plan),
        "",
        text_table([_SIZES, *map(_sizes, plan.lengths)]),
        "",
        *_columns(plan),
        "",
        *(["Of the batches asked for:", text_table([_ASKED, *map(_asked, asked)]), ""] if asked else []),
        "Traced peak of each phase, in GiB:",
        text_table(_in_gib([(size, size.phases) for size in shown])),
        "",
        "What the highest of them holds, in GiB:",
        text_table(_in_gib([(size, size.kinds) for size in shown])),
        "",
        *_host(plan),
        "",
        *_added({"": [plan]}),
    ]
    if step.paged_bytes:
        paged = format_bytes(step.paged_bytes)
        lines.append(f"Optimizer state of {paged} is in paged memory, which can move to the host: not counted.")
    return "\n".join(lines)


def grid_text(plans: Mapping[str, Sequence[Plan]], *, title: str) -> str:
    """The largest batch on each GPU, by its name, and number of ranks, and how many ranks of each GPU it takes.

    If batches were asked for, whether they fit. Each row has the most host memory that a machine needs.

    Args:
        plans: of each GPU, for the same numbers of ranks.
    """
    (first, *_), *_ = plans.values()
    lengths = [length.seq_len for length in first.lengths]
    all_plans = [one for row in plans.values() for one in row]
    rows = [
        [name, str(one.world_size), *map(_in_short, one.lengths), format_bytes(one.host.peak_bytes)]
        for name, row in plans.items()
        for one in row
    ]
    what = "largest batch per rank that fits, and in brackets the one used"
    if first.lengths[0].asked:
        what = "which batches per rank fit"
    header = ["GPU", "ranks", *(f"{tokens} tokens per row" for tokens in lengths), "host memory"]
    lines = [
        f"{title}: {what}",
        "",
        text_table([header, *rows], num_names=1),
        "",
        *(_fewest_ranks(plans, place) for place in range(len(lengths))),
        "",
        f"Host memory: the most that a machine needs, {_of_machine(all_plans)}. {offload_note(all_plans)}".strip(),
        "",
        *_added(plans),
    ]
    return "\n".join(lines)


def offload_note(plans: Sequence[Plan]) -> str:
    """What of a step is on the host, and what is not known of it; nothing if no parameters are there."""
    if not plans[0].step.host.offloaded_weights:
        return ""
    note = "Parameters, gradients and optimizer state are on the host."
    if any(one.world_size == 1 for one in plans):  # where FSDP2 gathers nothing that could be traced
        note += " On one rank their copies on the GPU are not counted."
    return note


def _of_machine(plans: Sequence[Plan]) -> str:
    """Which ranks are on the machine whose host memory is shown."""
    if all(one.host.ranks == one.world_size for one in plans):
        return "with all ranks on it"
    return f"with {' or '.join(sorted({str(one.host.ranks) for one in plans}, key=int))} of the ranks on it"


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
        text_table([["change", "process", "saved", "fits", "largest batch"], *rows], num_names=1),
    ]
    return "\n".join([*lines, "", *refused] if refused else lines)


def plan_json(
    plan: Plan,
    suggestions: Iterable[Suggestion],
    effects: Iterable[Suggestion] = (),
    events: StepEvents | None = None,
) -> dict[str, Any]:
    """The plan, its suggestions, effects of changes, and the modules of a step that was traced whole, if one was.

    All are values that JSON can hold; bytes are those of one rank, but for ``host``, which is a whole machine's.
    """
    step = plan.step
    return {
        "world_size": plan.world_size,
        "memory_bytes": plan.card.memory_bytes,
        "usable_bytes": round(plan.usable_bytes),
        "margin": plan.margin,
        "num_parameters": step.num_parameters,
        "num_frozen_parameters": step.num_frozen_parameters,
        "num_layers": step.num_layers,
        "traced_layers": list(step.traced_layers),
        "paged_bytes": step.paged_bytes,
        "overhead": asdict(plan.overhead),
        "host": _in_whole_bytes(asdict(plan.host) | {"peak_bytes": plan.host.peak_bytes}),
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
_SIZES = ("tokens per row", "largest batch", "surely fits", "used", "tokens per step", *_BYTES)
_ASKED = ("tokens per row", "batch", "fits", "tokens per step", *_BYTES)
# What a run does, by its name in ``HostPlan.tensor_bytes``.
_DOING = {
    "loading": "loading the checkpoint",
    "search": "searching for the batch size",
    "search again": "searching again",
    "training": "training",
    "saving": "saving a checkpoint",
}


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
    names = ["tokens per row", "batch", *rows[0][1]]
    return [names] + [
        [str(size.seq_len), str(size.batch_size), *(f"{num_bytes / _GIB:.2f}" for num_bytes in figures.values())]
        for size, figures in rows
    ]


def _device(plan: Plan) -> str:
    """The ranks' memory, and what of it is not used."""
    ranks = f"{_ranks(plan.world_size)} of {format_bytes(plan.card.memory_bytes)}"
    limit = "" if plan.limit_bytes == plan.card.memory_bytes else f", limited to {format_bytes(plan.limit_bytes)}"
    held_back = format_bytes(plan.limit_bytes - plan.usable_bytes)
    of = " of what torch's allocator may take" if plan.overhead.outside_bytes else ""
    return f"{ranks}{limit}; held back: {100 * plan.margin:g} %{of} ({held_back})"


def _columns(plan: Plan) -> list[str]:
    """What the columns of the table of sizes mean."""
    lines = ["`used` is the batch that a run takes by its settings; all columns after it are for that batch."]
    if any(length.exact_batch_size == 0 for length in plan.lengths):
        lines.append("In brackets: it does not fit.")
    if plan.overhead == Overhead.none():
        return lines
    return [
        *lines,
        "- traced: the bytes of all tensors at the step's peak",
        "- allocated: with what kernels and libraries need, as torch.cuda.max_memory_allocated shows it",
        "- reserved: with what torch's allocator holds but cannot use, as torch.cuda.max_memory_reserved shows it",
        "- process: with CUDA's and NCCL's own memory, as nvidia-smi shows it",
        "- give or take: by how much this may be wrong; `surely fits` is the largest batch that fits even if memory is"
        " underestimated by that much",
    ]


def _host(plan: Plan) -> list[str]:
    """Host memory of a machine, by what a run does."""
    host = plan.host
    per_process = format_bytes(host.process_bytes / host.ranks)
    rows = [
        [_DOING[name], f"{held / _GIB:.2f}", f"{(host.process_bytes + held) / _GIB:.2f}"]
        for name, held in host.tensor_bytes.items()
    ]
    lines = [
        f"Host memory of a machine with {_ranks(host.ranks)}, in GiB:",
        text_table([["while the run is", "tensors", f"with {per_process} per process"], *rows], num_names=1),
        "",
        f"At most {format_bytes(host.peak_bytes)}. Tensors: all that are in host memory, with the copies that loading,"
        " searching and saving make.",
        "A run searches again when it is resumed, and at the start of the epoch after an out-of-memory error.",
        f"The checkpoint's files ({format_bytes(host.file_bytes)}) are not counted: the system drops them from memory"
        " when it needs room.",
    ]
    if host.temporary_file_bytes:
        disk = format_bytes(host.temporary_file_bytes)
        lines.append(f"A search needs up to {disk} of disk in TMPDIR for its copies.")
    return [*lines, note] if (note := offload_note([plan])) else lines


def _added(plans: Mapping[str, Sequence[Plan]]) -> list[str]:
    """What the GPUs add, once for all for which that is the same, by numbers of ranks and by names where it is not.

    Args:
        plans: of each GPU, by its name, for the same numbers of ranks.
    """
    overhead = next(iter(plans.values()))[0].overhead
    if overhead == Overhead.none():
        return ["On a CPU nothing is added to what is traced."]
    ranks: dict[tuple[str, str], set[int]] = {}
    for row in zip(*plans.values(), strict=True):
        names: dict[str, list[str]] = {}
        for name, one in zip(plans, row, strict=True):
            names.setdefault(_parts(one.overhead), []).append(name)
        for said, gpus in names.items():
            of = f" of {', '.join(gpus)}" if len(names) > 1 else ""
            ranks.setdefault((said, of), set()).add(row[0].world_size)
    first = f"Not traced, but added ({overhead.source}):"
    if len(ranks) == 1:
        ((said, _),) = ranks
        return [first, f"{said}."]
    return [
        first,
        *(
            f"- on {', '.join(map(str, sorted(on)))} rank{'s' if on != {1} else ''}{of}: {said}"
            for (said, of), on in ranks.items()
        ),
    ]


def _parts(overhead: Overhead) -> str:
    return (
        f"{format_bytes(overhead.outside_bytes)} outside torch's allocator, {format_bytes(overhead.workspace_bytes)} of"
        f" workspaces, {overhead.bytes_per_token:,.0f} bytes per token for attention, {overhead.fragmentation:.0%} for"
        " fragmentation"
    )

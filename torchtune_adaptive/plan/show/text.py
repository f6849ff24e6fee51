"""A plan as text and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torchtune_adaptive.plan.decide import LengthPlan, Plan, SizePlan
from torchtune_adaptive.plan.gpu import Overhead
from torchtune_adaptive.plan.show.modules import step_json
from torchtune_adaptive.plan.suggestions import Suggestion
from torchtune_adaptive.plan.trace.events import StepEvents
from torchtune_adaptive.plan.what_if import AS_IT_IS
from torchtune_adaptive.text import byte_unit, format_bytes, text_table

_GIB = 2**30


def plan_text(plan: Plan, *, title: str) -> str:
    """Tables of the batch sizes, each phase's peak, and the kinds of memory at the highest peak."""
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
        *(["Requested batch sizes:", text_table([_ASKED, *map(_asked, asked)]), ""] if asked else []),
        "Traced peak memory of each phase, in GiB:",
        text_table(_in_gib([(size, size.phases) for size in shown])),
        "",
        "Traced memory at the highest peak by kind, in GiB:",
        text_table(_in_gib([(size, size.kinds) for size in shown])),
        "",
        *_host(plan),
        "",
        *_added({"": [plan]}),
    ]
    if step.paged_bytes:
        paged = format_bytes(step.paged_bytes)
        lines.append(f"Not counted: {paged} of optimizer state in paged memory, which can move to the host.")
    return "\n".join(lines)


def grid_text(plans: Mapping[str, Sequence[Plan]], *, title: str) -> str:
    """A table of the largest batch for each GPU and number of ranks, then the fewest ranks of each GPU that suffice.

    If batch sizes were requested, the table shows whether they fit. Each row has a machine's peak host memory.

    Args:
        plans: the plans of each GPU, by the GPU's name, for the same numbers of ranks.
    """
    (first, *_), *_ = plans.values()
    lengths = [length.seq_len for length in first.lengths]
    all_plans = [one for row in plans.values() for one in row]
    rows = [
        [name, str(one.world_size), *map(_in_short, one.lengths), format_bytes(one.host.peak_bytes)]
        for name, row in plans.items()
        for one in row
    ]
    what = "largest batch per rank that fits (in brackets: the batch that a run uses)"
    if first.lengths[0].asked:
        what = "which batch sizes per rank fit"
    header = ["GPU", "ranks", *(f"{tokens} tokens per row" for tokens in lengths), "host memory"]
    lines = [
        f"{title}: {what}",
        "",
        text_table([header, *rows], num_names=1),
        "",
        *(_fewest_ranks(plans, place) for place in range(len(lengths))),
        "",
        f"Host memory: a machine's peak, {_of_machine(all_plans)}. {offload_note(all_plans)}".strip(),
        "",
        *_added(plans),
    ]
    return "\n".join(lines)


def offload_note(plans: Sequence[Plan]) -> str:
    """Which part of a step is in host memory, and what is not counted. Empty without offloaded parameters."""
    if not plans[0].step.host.offloaded_weights:
        return ""
    note = "Parameters, gradients and optimizer state are in host memory."
    if any(one.world_size == 1 for one in plans):  # FSDP2 then gathers nothing that a trace could see
        note += " With one rank, their copies on the GPU are not counted."
    return note


def _of_machine(plans: Sequence[Plan]) -> str:
    """How many ranks run on the machine whose host memory is shown."""
    if all(one.host.ranks == one.world_size for one in plans):
        return "with all ranks on it"
    return f"with {' or '.join(sorted({str(one.host.ranks) for one in plans}, key=int))} of the ranks on it"


def _in_short(length: LengthPlan) -> str:
    if length.asked:
        return ", ".join(f"{size.batch_size} {size.fits}" for size in length.asked)
    return "none" if length.exact_batch_size == 0 else f"{_size(length.exact_batch_size)} ({length.batch_size})"


def _fewest_ranks(plans: Mapping[str, Sequence[Plan]], place: int) -> str:
    """The fewest of the planned ranks of each GPU on which rows of one length fit."""
    (first, *_), *_ = plans.values()
    what = f"Rows of {first.lengths[place].seq_len} tokens"
    fewest = {
        name: min(fitting)
        for name, row in plans.items()
        if (fitting := [one.world_size for one in row if one.lengths[place].exact_batch_size != 0])
    }
    if not fewest:
        return f"{what} do not fit on any of these."
    enough = [f"{_ranks(number)} of {name}" for name, number in fewest.items()]
    return f"{what} need at least {', or '.join(enough)}."


def suggestion_text(suggestion: Suggestion) -> str:
    """One line: what fits after the change."""
    length = suggestion.length
    if length is None:
        return f"{suggestion.change}: not planned, {suggestion.refused}"
    if length.exact_batch_size == 0:
        needed = format_bytes(length.process_bytes)
        return f"{suggestion.change}: does not fit either; one row of {length.seq_len} tokens needs {needed}"
    return f"{suggestion.change}: largest batch_size {_size(length.exact_batch_size)} (rows of {length.seq_len} tokens)"


def what_if_text(effects: Iterable[Suggestion]) -> str:
    """How much memory each change saves at the config's own batch size, largest saving first."""
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
    """The plan as JSON values, with its suggestions, the effects of changes, and the modules of a traced step if any.

    Bytes are per rank, except ``host``, which is per machine.
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
    """The value with every float in it rounded. Only byte counts of a size are floats."""
    if isinstance(value, dict):
        return {key: _in_whole_bytes(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_in_whole_bytes(one) for one in value]
    return round(value) if isinstance(value, float) else value


_BYTES = ("traced", "allocated", "reserved", "process", "uncertainty")
_SIZES = ("tokens per row", "largest batch", "safe batch", "used", "tokens per step", *_BYTES)
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
    """Table rows with one column per figure, in GiB."""
    names = ["tokens per row", "batch", *rows[0][1]]
    return [names] + [
        [str(size.seq_len), str(size.batch_size), *(f"{num_bytes / _GIB:.2f}" for num_bytes in figures.values())]
        for size, figures in rows
    ]


def _device(plan: Plan) -> str:
    """The ranks' memory, and the margin that a plan keeps free."""
    ranks = f"{_ranks(plan.world_size)} of {format_bytes(plan.card.memory_bytes)}"
    limit = "" if plan.limit_bytes == plan.card.memory_bytes else f", limited to {format_bytes(plan.limit_bytes)}"
    margin = format_bytes(plan.limit_bytes - plan.usable_bytes)
    of = " of what torch's allocator may use" if plan.overhead.outside_bytes else ""
    return f"{ranks}{limit}; margin kept free: {100 * plan.margin:g} %{of} ({margin})"


def _columns(plan: Plan) -> list[str]:
    """What the columns of the table of batch sizes mean."""
    lines = ["`used` is the batch that a run with these settings uses. All columns after it are for that batch."]
    if any(length.exact_batch_size == 0 for length in plan.lengths):
        lines.append("Sizes in brackets do not fit.")
    if plan.overhead == Overhead.none():
        return lines
    return [
        *lines,
        "- traced: all tensors at the step's peak",
        "- allocated: traced, plus memory of kernels and libraries; see torch.cuda.max_memory_allocated",
        "- reserved: allocated, plus fragmentation; see torch.cuda.max_memory_reserved",
        "- process: reserved, plus memory of CUDA and NCCL, as nvidia-smi shows it",
        "- uncertainty: by how much `process` may be wrong. `safe batch` is the largest batch that fits even if"
        " `process` is underestimated by that much.",
    ]


def _host(plan: Plan) -> list[str]:
    """Host memory of a machine, by stage of a run."""
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
        f"Peak: {format_bytes(host.peak_bytes)}. `tensors` are all tensors in host memory, with the copies that"
        " loading, searching and saving make.",
        "A run searches again when it resumes, and at the start of the epoch after an out-of-memory error.",
        f"Checkpoint files ({format_bytes(host.file_bytes)}) are not counted: the system can drop them from its page"
        " cache.",
    ]
    if host.temporary_file_bytes:
        disk = format_bytes(host.temporary_file_bytes)
        lines.append(f"A search needs up to {disk} of disk space in TMPDIR for its copies.")
    return [*lines, note] if (note := offload_note([plan])) else lines


def _added(plans: Mapping[str, Sequence[Plan]]) -> list[str]:
    """The overhead of the GPUs. Equal overheads share a line; others are listed by number of ranks and GPU.

    Args:
        plans: the plans of each GPU, by the GPU's name, for the same numbers of ranks.
    """
    overhead = next(iter(plans.values()))[0].overhead
    if overhead == Overhead.none():
        return ["A CPU has no overhead: traced bytes are all that count."]
    ranks: dict[tuple[str, str], set[int]] = {}
    for row in zip(*plans.values(), strict=True):
        names: dict[str, list[str]] = {}
        for name, one in zip(plans, row, strict=True):
            names.setdefault(_parts(one.overhead), []).append(name)
        for overhead_text, gpus in names.items():
            of = f" of {', '.join(gpus)}" if len(names) > 1 else ""
            ranks.setdefault((overhead_text, of), set()).add(row[0].world_size)
    first = f"Overhead of the GPU, added to the traced bytes ({overhead.source}):"
    if len(ranks) == 1:
        ((overhead_text, _),) = ranks
        return [first, f"{overhead_text}."]
    return [
        first,
        *(
            f"- on {', '.join(map(str, sorted(on)))} rank{'s' if on != {1} else ''}{of}: {overhead_text}"
            for (overhead_text, of), on in ranks.items()
        ),
    ]


def _parts(overhead: Overhead) -> str:
    return (
        f"{format_bytes(overhead.outside_bytes)} outside torch's allocator, {format_bytes(overhead.workspace_bytes)}"
        f" for workspaces, {overhead.bytes_per_token:,.0f} bytes per token for attention, {overhead.fragmentation:.0%}"
        " for fragmentation"
    )

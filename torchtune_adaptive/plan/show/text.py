"""A plan as text: what fits and what does not in two lines, then tables of where each figure comes from."""

from collections.abc import Iterable, Sequence

from torchtune_adaptive.engine.search.strategies import NO_BOUND
from torchtune_adaptive.plan.decide import LengthPlan, Plan, PlannedChange, SizePlan
from torchtune_adaptive.plan.gpu import Overhead
from torchtune_adaptive.plan.host_memory import HostPlan
from torchtune_adaptive.text import byte_unit, count_text, format_bytes, text_table

LARGE_HOST_BYTES = 64 * 2**30  # more than many machines have: said at the top
_BYTES = ("allocated", "reserved", "process", "uncertainty")
# What a run does, by its name in ``HostPlan.tensor_bytes``.
_DOING = {
    "loading": "loading the checkpoint",
    "search": "searching for the batch size",
    "search again": "searching again",
    "training": "training",
    "saving": "saving a checkpoint",
}


def plan_text(plan: Plan, *, ways: Sequence[PlannedChange] = (), command: str = "") -> str:
    """The whole plan.

    Args:
        ways: planned changes that would need less memory, if nothing fits.
        command: runs what was planned; "" if there is none.
    """
    shown = [size for length in plan.lengths for size in length.shown]
    asked = [size for length in plan.lengths for size in length.asked]
    parts = [
        [_headline(plan), *verdict(plan, ways)],
        [plan.assumptions] if plan.assumptions else [],
        [_device(plan), "", text_table(_sizes(plan.lengths))],
        _columns(plan),
        ["Requested batch sizes:", text_table(_asked(asked))] if asked else [],
        _table("Allocated at the peak of each phase", [(one, one.phases) for one in shown]),
        _table("Allocated at the highest peak, by kind", [(one, one.kinds) for one in shown]),
        [] if plan.host is None else _host(plan.host, [plan]),
        [overhead_text(plan.device.overhead)],
        _paged(plan),
        ["Changes that need less memory:", *(f"- {change_text(way)}" for way in ways)] if ways else [],
        ["To run it:", f"  {command}"] if command else [],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def verdict(plan: Plan, ways: Sequence[PlannedChange] = ()) -> list[str]:
    """What fits, and what to do: two lines, and a third if a machine needs much host memory."""
    lines = [" ".join(_judgement(length, plan) for length in plan.lengths), _advice(plan.decisive, ways)]
    host = plan.host
    if host is not None and host.peak_bytes > LARGE_HOST_BYTES:
        stage = max(host.tensor_bytes, key=host.tensor_bytes.__getitem__)
        lines.append(f"A machine needs {format_bytes(host.peak_bytes)} of host memory, while it is {_DOING[stage]}.")
    return lines


def _judgement(length: LengthPlan, plan: Plan) -> str:
    """Whether the batch that a run would use fits."""
    used = length.used
    rows, one = _rows(used.batch_size, length), used.batch_size == 1
    spare_bytes = used.usable_bytes - used.process_bytes
    if used.fits == "does not fit":
        return f"{rows} {'does' if one else 'do'} not fit: {format_bytes(-spare_bytes)} are missing."
    if used.fits == "may fit":
        return (
            f"{rows} may fit: {format_bytes(used.process_bytes)}, give or take {format_bytes(used.uncertainty_bytes)}."
        )
    return f"{rows} {'fits' if one else 'fit'}, with {format_bytes(spare_bytes)} to spare."


def _advice(length: LengthPlan, ways: Sequence[PlannedChange]) -> str:
    """What to do for the longest rows."""
    largest, safe = length.largest_batch_size, length.safe_batch_size
    if largest is None:
        return f"At least {_rows(NO_BOUND, length)} fit."
    if largest > 0:
        is_safe = "none is safe" if not safe else "1 is safe" if safe == 1 else f"{safe:,} are safe"
        is_sure = length.used.batch_size != largest or length.used.fits == "fits"
        fits = ("fits" if largest == 1 else "fit") if is_sure else "may fit"
        return f"At most {_rows(largest, length)} {fits}; {is_safe}."
    nearest = next((way for way in ways if way.fits), None)
    if nearest is None:
        fits = "is likely to fit" if length.used.fits == "may fit" else "fits"
        return f"Not even one {fits}{', nor with any of the changes below' if ways else ''}."
    return f"Nearest way: {change_text(nearest)}."


def change_text(way: PlannedChange) -> str:
    """One line: what fits after the change."""
    length = way.length
    if length is None:
        return f"{way.change}: not planned, {way.refused}"
    if not way.fits:
        return (
            f"{way.change}: does not fit either; {_rows(1, length)} needs {format_bytes(length.asked[0].process_bytes)}"
        )
    return f"{way.change}: at most {_rows(length.largest_batch_size, length)}"


def what_if_text(effects: Iterable[PlannedChange]) -> str:
    """How much memory each change saves at the requested batch size, largest saving first. The first is no change."""
    effects = list(effects)
    planned = [(effect.change, effect.length, effect.length.asked[0]) for effect in effects if effect.length]
    needed = {change: size.process_bytes for change, _, size in planned}
    now_bytes = planned[0][2].process_bytes
    planned.sort(key=lambda one: needed[one[0]])
    unit, unit_bytes = byte_unit(max(needed.values()))
    rows = [
        [
            change,
            f"{needed[change] / unit_bytes:.2f}",
            f"{round((now_bytes - needed[change]) / unit_bytes, 2) + 0.0:.2f}",
            size.fits,
            number(length.largest_batch_size),
        ]
        for change, length, size in planned
    ]
    _, length, size = planned[0]
    refused = [f"- {effect.change}: not planned, {effect.refused}" for effect in effects if effect.length is None]
    lines = [
        f"With a batch of {_rows(size.batch_size, length)}, in {unit}:",
        text_table([["change", "process", "saved", "fits", "largest batch"], *rows], num_names=1),
    ]
    return "\n".join([*lines, "", *refused] if refused else lines)


def offload_note(plans: Sequence[Plan]) -> str:
    """Which part of a step is in host memory, and what is not counted. Empty without offloaded parameters."""
    if not plans[0].step.host.offloaded_weights:
        return ""
    note = "Parameters, gradients and optimizer state are in host memory."
    if any(one.world_size == 1 for one in plans):  # FSDP2 then gathers nothing that a trace could see
        note += " With one rank, their copies on the GPU are not counted."
    return note


def number(batch_size: int | None) -> str:
    """A largest batch size."""
    return "any" if batch_size is None else str(batch_size)


def overhead_text(overhead: Overhead, on: str = "on the GPU") -> str:
    """What a process has on its device beside tensors, as one line."""
    if not overhead.caches:
        return "A CPU has no overhead: the bytes of tensors are all that count."
    least, most = map(format_bytes, (overhead.least_outside_bytes, overhead.most_outside_bytes))
    return (
        f"Beside tensors, a process has {on} {least} to {most} of CUDA and NCCL outside torch's allocator, and"
        f" {format_bytes(sum(overhead.workspaces))} of workspaces in it."
    )


def _rows(batch_size: int | None, length: LengthPlan) -> str:
    """How many rows of which length, or how many samples."""
    noun = "sample" if length.seq_len is None else "row"
    rows = f"any number of {noun}s" if batch_size is None else count_text(batch_size, noun)
    return rows if length.seq_len is None else f"{rows} of {length.seq_len} tokens"


def _headline(plan: Plan) -> str:
    step = plan.step
    layers = " and ".join(map(str, step.traced_layers))
    traced = f", extrapolated from models of {layers} layers" if len(step.traced_layers) > 1 else ""
    trained = _count(step.num_parameters - step.num_frozen_parameters)
    frozen = f"; {_count(step.num_frozen_parameters)} in a frozen model" if step.num_frozen_parameters else ""
    in_layers = f" in {count_text(step.num_layers, 'layer')}" if step.num_layers else ""
    return f"{plan.title}: {trained} parameters{in_layers}{traced}{frozen}"


def _count(number_of: int) -> str:
    return f"{number_of / 1e9:.2f} B" if number_of >= 1e9 else f"{number_of / 1e6:.2f} M"


def _device(plan: Plan) -> str:
    """The ranks' memory, and the margin that a plan keeps free."""
    device = plan.device
    memory_bytes = device.limit_bytes if device.memory_bytes is None else device.memory_bytes
    ranks = f"{count_text(plan.world_size, 'rank')} of {format_bytes(memory_bytes)}"
    limit = "" if device.limit_bytes >= memory_bytes else f", limited to {format_bytes(device.limit_bytes)}"
    margin = format_bytes(device.limit_bytes - device.usable_bytes)
    of = " of what torch's allocator may use" if device.overhead.caches else ""
    return f"{ranks}{limit}; a search keeps {100 * device.margin:g} %{of} free ({margin})"


def _sizes(lengths: Sequence[LengthPlan]) -> list[list[str]]:
    """Table rows: what fits with rows of each length."""
    header = ["largest batch", "safe batch", "used", "tokens per step", *_BYTES]
    rows = [
        [
            number(length.largest_batch_size),
            number(length.safe_batch_size),
            f"({length.used.batch_size})" if length.used.fits == "does not fit" else f"{length.used.batch_size}",
            "-" if length.tokens_per_step is None else f"{length.tokens_per_step:,}",
            *_bytes(length.used),
        ]
        for length in lengths
    ]
    return _with_tokens([length.seq_len for length in lengths], [header, *rows])


def _asked(sizes: Sequence[SizePlan]) -> list[list[str]]:
    rows = [["batch", "fits", *_BYTES], *([f"{one.batch_size}", one.fits, *_bytes(one)] for one in sizes)]
    return _with_tokens([one.seq_len for one in sizes], rows)


def _table(title: str, rows: Sequence[tuple[SizePlan, dict[str, int]]]) -> list[str]:
    """A title, and a table with one column per figure."""
    names = list(dict.fromkeys(name for _, figures in rows for name in figures))
    unit, unit_bytes = byte_unit(max(max(figures.values()) for _, figures in rows))
    cells = [
        [f"{size.batch_size}", *(f"{figures.get(name, 0) / unit_bytes:.2f}" for name in names)]
        for size, figures in rows
    ]
    lines = _with_tokens([size.seq_len for size, _ in rows], [["batch", *names], *cells])
    return [f"{title}, in {unit}:", text_table(lines)]


def _with_tokens(seq_lens: Sequence[int | None], rows: list[list[str]]) -> list[list[str]]:
    """The table rows with the length of each row of data in front, if they are of tokens."""
    if None in seq_lens:
        return rows
    return [[tokens, *row] for tokens, row in zip(["tokens per row", *map(str, seq_lens)], rows, strict=True)]


def _bytes(size: SizePlan) -> list[str]:
    figures = size.allocated_bytes, size.reserved_bytes, size.process_bytes, size.uncertainty_bytes
    return list(map(format_bytes, figures))


def _columns(plan: Plan) -> list[str]:
    """What the columns of the table of batch sizes mean."""
    used = "the largest batch" if plan.uses_largest else "the batch that a run with these settings uses"
    lines = [f"`used` is {used}. All columns after it are for that batch."]
    if any(length.used.fits == "does not fit" for length in plan.lengths):
        lines.append("A batch in brackets does not fit.")
    if not plan.device.overhead.caches:
        return lines
    return [
        *lines,
        "- allocated: tensors and workspaces at the step's peak; see torch.cuda.max_memory_allocated",
        "- reserved: what torch's allocator takes for them; see torch.cuda.max_memory_reserved",
        "- process: reserved, plus memory of CUDA and NCCL, as nvidia-smi shows it",
        "- uncertainty: by how much `process` may be wrong. The safe batch is the largest that fits even if `process`"
        " is too low by that much.",
    ]


def _host(host: HostPlan, plans: Sequence[Plan]) -> list[str]:
    """Host memory of a machine, by stage of a run."""
    per_process, (unit, unit_bytes) = format_bytes(host.process_bytes / host.ranks), byte_unit(host.peak_bytes)
    rows = [
        [_DOING[name], f"{held / unit_bytes:.2f}", f"{(host.process_bytes + held) / unit_bytes:.2f}"]
        for name, held in host.tensor_bytes.items()
    ]
    lines = [
        f"Host memory of a machine with {count_text(host.ranks, 'rank')}, in {unit}:",
        text_table([["while the run is", "tensors", f"with {per_process} per process"], *rows], num_names=1),
        "",
        f"Peak: {format_bytes(host.peak_bytes)}. `tensors` are all tensors in host memory, with the copies that"
        " loading, searching and saving make.",
        "A run searches again when it resumes.",
        f"Checkpoint files ({format_bytes(host.file_bytes)}) are not counted: the system can drop them from its page"
        " cache.",
    ]
    if host.temporary_file_bytes:
        disk = format_bytes(host.temporary_file_bytes)
        lines.append(f"A search needs up to {disk} of disk space in TMPDIR for its copies.")
    return [*lines, note] if (note := offload_note(plans)) else lines


def _paged(plan: Plan) -> list[str]:
    if not plan.step.paged_bytes:
        return []
    paged = format_bytes(plan.step.paged_bytes)
    return [f"Not counted: {paged} of optimizer state in paged memory, which can move to the host."]

"""A table of what fits on several GPUs and numbers of ranks."""

from collections.abc import Iterator, Mapping, Sequence

from torchtune_adaptive.plan.decide import LengthPlan, Plan
from torchtune_adaptive.plan.gpu import Overhead
from torchtune_adaptive.plan.show.text import number, offload_note, overhead_text
from torchtune_adaptive.text import count_text, format_bytes, text_table

Grid = Mapping[str, Sequence[Plan]]  # plans by the GPU's name, for the same numbers of ranks


def grid_text(plans: Grid) -> str:
    """A table of the largest batch for each GPU and number of ranks, then the fewest ranks of each GPU that suffice.

    If batch sizes were requested, the table shows whether they fit. Each row has a machine's peak host memory.
    """
    all_plans = [one for row in plans.values() for one in row]
    lengths = all_plans[0].lengths
    what = "largest batch per rank that fits (in brackets: the batch that a run uses)"
    if lengths[0].asked:
        what = "which batch sizes per rank fit"
    header = ["GPU", "ranks", *(f"{length.seq_len} tokens per row" for length in lengths), "host memory"]
    rows = [
        [name, str(one.world_size), *map(_in_short, one.lengths), _host_peak(one)]
        for name, row in plans.items()
        for one in row
    ]
    lines = [
        f"{all_plans[0].title}: {what}",
        "",
        text_table([header, *rows], num_names=1),
        "",
        *(_fewest_ranks(plans, place) for place in range(len(lengths))),
        "",
        f"Host memory: a machine's peak, {_of_machine(all_plans)}. {offload_note(all_plans)}".strip(),
        "",
        *_overheads(all_plans),
        *dict.fromkeys(one.assumptions for one in all_plans if one.assumptions),
    ]
    return "\n".join(lines)


def _host_peak(plan: Plan) -> str:
    assert plan.host is not None
    return format_bytes(plan.host.peak_bytes)


def _of_machine(plans: Sequence[Plan]) -> str:
    """How many ranks run on the machine whose host memory is shown."""
    ranks = [(one.host.ranks, one.world_size) for one in plans if one.host is not None]
    if all(of_machine == world_size for of_machine, world_size in ranks):
        return "with all ranks on it"
    return f"with {' or '.join(map(str, sorted({of_machine for of_machine, _ in ranks})))} of the ranks on it"


def _in_short(length: LengthPlan) -> str:
    if length.asked:
        return ", ".join(f"{size.batch_size} {size.fits}" for size in length.asked)
    used = length.used.batch_size
    return "none" if length.largest_batch_size == 0 else f"{number(length.largest_batch_size)} ({used})"


def _fewest_ranks(plans: Grid, place: int) -> str:
    """The fewest of the planned ranks of each GPU on which rows of one length fit."""
    (first, *_), *_ = plans.values()
    what = f"Rows of {first.lengths[place].seq_len} tokens"
    fewest = {
        name: min(fitting)
        for name, row in plans.items()
        if (fitting := [one.world_size for one in row if one.lengths[place].largest_batch_size != 0])
    }
    if not fewest:
        return f"{what} do not fit on any of these."
    enough = [f"{count_text(ranks, 'rank')} of {name}" for name, ranks in fewest.items()]
    return f"{what} need at least {', or '.join(enough)}."


def _overheads(plans: Sequence[Plan]) -> Iterator[str]:
    """What processes have on the GPUs beside tensors; a line for all that have the same."""
    alike: dict[Overhead, list[str]] = {}
    for one in plans:
        alike.setdefault(one.device.overhead, []).append(f"{count_text(one.world_size, 'rank')} of {one.device.name}")
    for overhead, names in alike.items():
        yield overhead_text(overhead, "on the GPU" if len(alike) == 1 else f"on {', '.join(names)}")

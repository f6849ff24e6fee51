"""What happened in a run, as sentences."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_adaptive.engine.search.tables import failures_text, probe_table, rounding_text
from torchtune_adaptive.report.read import OUT_OF_MEMORY, THRASHING, Run, Search
from torchtune_adaptive.text import count_text, format_bytes, ranks_text
from torchtune_adaptive.training.run_log import SEARCH_ONLY, SIZES

_LONGEST_LIST = 12  # of sentences of one kind
_MOST_NAMES = 8  # of checkpoints
_STARTS = ("started", "resumed")


@dataclass(frozen=True)
class Section:
    """Sentences under a title; ``table`` is aligned text below them, "" without one."""

    title: str
    lines: Sequence[str]
    table: str = ""


def story(run: Run) -> list[Section]:
    """What is known of the run, in the order in which it happened."""
    sections = [_search(search) for search in run.searches]
    if run.of_kind(SEARCH_ONLY):
        return [*sections, Section("Training", ["None: the run ended after its search."])]
    if not sections:
        sections.append(Section("Search", ["No search for a batch size is recorded."]))
    sections.append(Section("Batch and micro-batch", _shortened(_sizes(run)) or ["No change of size is recorded."]))
    sections.append(Section("Out of memory", _shortened(_memory(run))))
    sections.append(Section("Training", list(_training(run))))
    if lines := list(_saved(run)):
        sections.append(Section("Checkpoints and resumptions", _shortened(lines)))
    return sections


def story_text(run: Run) -> str:
    """The story, for a terminal."""
    parts = [f"Run in {run.output_dir}"]
    for section in story(run):
        lines = [section.title, *(f"  {line}" for line in section.lines)]
        lines += [f"  {line}" for line in section.table.splitlines()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _search(search: Search) -> Section:
    result = search.result
    rows = "" if search.seq_len is None else f" Probes had rows of {search.seq_len:,} tokens."
    all_tried = ", which is all that may be tried" if result.exact_batch_size == result.bound else ""
    lines = [
        f"{result.strategy}: the largest batch size that fits is {result.exact_batch_size}{all_tried}"
        f"{rounding_text(result)}.{rows}",
        f"{format_bytes(result.memory_limit_bytes)} per rank, of which {result.margin:.0%} is kept free;"
        f" {count_text(result.world_size, 'rank')}.",
        f"{count_text(len(result.probes), 'probe')} in {sum(probe.seconds for probe in result.probes):.1f} s,"
        f" {failures_text(result.probes)}. Figures are those of rank 0.",
    ]
    lines += [f"{name}: {value}" for name, value in search.chosen.items()]
    if search.timings:
        rates = ", ".join(f"{one.rate:,.0f} at {size}" for size, one in search.timings.items())
        lines.append(f"Tokens per second by micro-batch: {rates}.")
    title = "Search before the run" if search.is_before else "Search"
    return Section(f"{title}: {search.of}" if search.of else title, lines, probe_table(result))


def _sizes(run: Run) -> Iterator[str]:
    short_in = {shortage["step"] for shortage in run.of_kind(OUT_OF_MEMORY, THRASHING)}
    for entry in run.of_kind(SIZES):
        if entry["step"] in short_in and entry["reason"].startswith("micro-batch"):
            continue  # listed under "Out of memory"
        is_of_epoch = "samples_per_step" in entry
        where = f"epoch {entry['epoch']}" if is_of_epoch else f"step {entry['step']}"
        size = f"{entry['samples_per_step']} samples per optimizer step: " if is_of_epoch else ""
        yield f"{where}: {size}{entry['reason'].removeprefix(f'{where}: ')}"


def _memory(run: Run) -> list[str]:
    if shortages := run.of_kind(OUT_OF_MEMORY, THRASHING):
        return [_shortage(one) for one in shortages]
    if not (ends := run.of_kind(*_STARTS, "ended")):
        return ["It is not recorded."]
    return ["Memory never ran out." if ends[-1]["event"] == "ended" else "No shortage is recorded."]


def _shortage(one: Mapping[str, Any]) -> str:
    before, after, slowdown = one["before"], one["after"], one.get("slowdown")
    what = "ran out of memory" if one["event"] == OUT_OF_MEMORY else "freed the allocator's cache"
    what += "" if slowdown is None else f", which makes steps {slowdown:.1%} slower,"
    change = "no change" if before == after else f"micro-batch {before} -> {after} {one['unit']}"
    return f"step {one['step']}: {ranks_text(one['ranks'])} {what} in {one['phase']} ({one['figures']}); {change}"


def _training(run: Run) -> Iterator[str]:
    yield _how_far(run)
    if not run.steps:
        yield "No step is recorded."
        return
    if losses := run.column("loss"):
        yield f"Loss {losses[0][1]:.4g} in step {losses[0][0]}, {losses[-1][1]:.4g} in step {losses[-1][0]}."
    if missing := sum("loss" in one and one["loss"] is None for one in run.steps):
        yield f"The loss was not finite in {count_text(missing, 'logged step')}."
    seconds = dict(run.column("seconds"))
    if rates := [(one, seconds[step]) for step, one in run.column("tokens_per_second_per_gpu") if seconds.get(step)]:
        mean = sum(rate * weight for rate, weight in rates) / sum(weight for _, weight in rates)
        low, high = min(rate for rate, _ in rates), max(rate for rate, _ in rates)
        yield f"{mean:,.0f} tokens per second per rank on average, {low:,.0f} to {high:,.0f} in logged steps."
    if shares := [share for _, share in run.column("mfu")]:
        yield f"The model's own operations took {sum(shares) / len(shares):.1%} of the card's peak on average (MFU)."
    if padding := [share for _, share in run.column("padding")]:
        yield f"{sum(padding) / len(padding):.1%} of the tokens were padding on average."
    if peaks := run.column("peak_memory_bytes"):
        step, peak = max(peaks, key=lambda one: one[1])
        limit = run.last_value("memory_limit_bytes")
        of = f" of {format_bytes(limit)}" if limit else ""
        yield f"Peak memory {format_bytes(peak)}{of} on rank 0, in step {step}."


def _how_far(run: Run) -> str:
    ends = run.of_kind(*_STARTS, "ended")
    last = max([0, *(one["step"] for one in (*run.steps, *run.of_kind("checkpoint"), *ends))])
    done = f"{count_text(last, 'optimizer step')}."
    if run.steps:
        every = run.last_value("log_every_n_steps") or 1
        logged = "each is logged" if every == 1 else f"one in {every} is logged"
        done = f"{done[:-1]}; {logged}."
    if not ends:
        return done if run.steps else "Training is not recorded."
    if ends[-1]["event"] != "ended":
        return f"No end is recorded: the run is still going, or was stopped. {done}"
    return f"The run is {ends[-1].get('how', 'ended')}: {done}"


def _saved(run: Run) -> Iterator[str]:
    for event in run.of_kind("resumed", "ended"):
        if event["event"] == "resumed":
            yield f"step {event['step']}: resumed from {event.get('checkpoint')}"
        elif event.get("how") != "complete":
            yield f"step {event['step']}: {event.get('how')}"
    if names := [Path(str(event.get("path"))).name for event in run.of_kind("checkpoint")]:
        listed = names if len(names) <= _MOST_NAMES else ["...", *names[-_MOST_NAMES:]]
        yield f"{count_text(len(names), 'checkpoint')} saved: {', '.join(listed)}."


def _shortened(lines: Iterator[str] | Sequence[str]) -> list[str]:
    """The lines; of many the first and the last ones."""
    lines, half = list(lines), _LONGEST_LIST // 2
    if len(lines) <= _LONGEST_LIST:
        return lines
    return [*lines[:half], f"... {len(lines) - 2 * half} more ...", *lines[-half:]]

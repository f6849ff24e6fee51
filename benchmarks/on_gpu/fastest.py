"""What ``tune-adaptive fastest`` finds for a config: its changes, each set up here with random weights."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from benchmarks.live import kind_of
from benchmarks.on_gpu.random_recipe import let_go, live_random_recipe, start_group
from benchmarks.on_gpu.sizes import config_of
from benchmarks.on_gpu.stage import Section, Stage
from tests.support.recipe_runs import RECIPES
from torchtune_adaptive.errors import NothingFitsError, reason_of
from torchtune_adaptive.fastest.changes import questions_of
from torchtune_adaptive.fastest.climb import Climb, Outcome, times
from torchtune_adaptive.fastest.set_up import SetUps, with_search
from torchtune_adaptive.stock.configs import resolved
from torchtune_adaptive.text import format_bytes

HEADER = ["settings", "micro-batch", "tokens/s", "times as it is", "rows that fit", "peak", "set-up, s", "chosen"]
_SAMPLES = 32  # of an optimizer step, as in the stock configs
_SHARES = (0.65, 1.0)  # of the time that is left, for each config
_LEAST_S = 40.0  # another config is not begun with less


def measure(stage: Stage) -> Iterator[list[Section]]:
    """One config after the other: as it is, and then with one change after the other while there is time."""
    start_group(stage)
    sections: list[Section] = []
    failed: list[str] = []
    for name, share in zip((stage.lora, stage.full), _SHARES, strict=True):
        section = Section(title=f"What trains fastest: {name}", header=HEADER, text=[_about(stage)])
        sections.append(section)
        if sections[1:] and stage.seconds_left < _LEAST_S:
            section.text.append("Not measured, because no time was left.")
        else:
            climb = _climb(stage, name, share * stage.seconds_left)
            _report(section, climb)
            if not section.rows:
                failed.append(name)
        yield sections
    if failed:
        raise SystemExit(f"could not be timed: {', '.join(failed)}")


def _about(stage: Stage) -> str:
    limit_bytes = _limit_bytes(stage)
    memory = "the whole memory" if limit_bytes is None else stage.limit_text(limit_bytes)
    return (
        f"{_SAMPLES} samples per optimizer step of up to {stage.seq_len} random tokens (log-normal, median a quarter of"
        f" that), random weights, one process, {memory}. *As it is*: the config's own micro-batch, and then the fastest"
        " one; each further set-up with its fastest one. `compile` is tried first, which no CPU can measure."
    )


def _limit_bytes(stage: Stage) -> int | None:
    """A search on a CPU needs a limit."""
    return stage.limits_bytes[-1] if stage.is_rehearsal else None


def _climb(stage: Stage, name: str, seconds: float) -> Climb:
    """What was tried for the config ``name`` in about so many ``seconds``."""
    cfg = config_of(stage, name, _limit_bytes(stage), lengths="random")
    recipe, _ = RECIPES[kind_of(cfg)]
    set_ups = SetUps([], recipe, cfg, _SAMPLES, Path(stage.directory))
    climb = Climb(lambda words, values: _measured(set_ups, words, values), lambda _: None, seconds)
    kinds = ("checkpointing",) if stage.is_rehearsal else ("checkpointing", "compile")
    questions = questions_of(DictConfig(resolved(cfg)), recipe=recipe, ranks=1, kinds=kinds)
    climb.run(sorted(questions, key=lambda question: question.kind != "compile"))
    return climb


def _measured(set_ups: SetUps, words: str, values: Mapping[str, Any]) -> Outcome:
    """Set the recipe up in this process, which saves the time in which a process of its own would start."""
    started, outcome = time.monotonic(), Outcome(words=words, values=values)
    try:
        recipe = live_random_recipe(set_ups.config(values))
        sizes = recipe.trainer.sizes
        outcome = with_search(outcome, sizes.result, {str(limit): one for limit, one in sizes.timings.items()})
        let_go(recipe)
    except Exception as error:  # keeps the other set-ups
        is_short = isinstance(error, NothingFitsError)
        outcome = replace(outcome, why_not=reason_of(error), is_short_of_memory=is_short)
    finally:
        torch._dynamo.reset()
    return replace(outcome, seconds=time.monotonic() - started)


def _report(section: Section, climb: Climb) -> None:
    """Fill ``section`` with what was tried."""
    first, *_ = climb.outcomes
    section.text.extend(f"{one.words}: {one.why_not}." for one in climb.outcomes if one.why_not)
    if first.timings:
        own, timing = next(iter(first.timings.items()))
        section.rows.append([first.words, own, f"{timing.rate:.0f}", "1.00", *[""] * (len(HEADER) - 4)])
    for one in (one for one in climb.outcomes if one.timings):
        speeds = [f"{one.timing.rate:.0f}", times(one, first)]
        costs = [str(one.found), format_bytes(one.peak_bytes), f"{one.seconds:.0f}"]
        section.rows.append([one.words, one.micro_batch, *speeds, *costs, "yes" if one is climb.best else ""])
        rates = {size: timing.rate for size, timing in one.timings.items()}
        section.data.append({"settings": one.words, "tokens_per_second": rates, "seconds": one.seconds})

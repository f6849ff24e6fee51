"""Batch sizes on cards with different memory: planned, found, with one more row, and their tokens per second."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm

from benchmarks.live import probe_maker, real_steps
from benchmarks.on_gpu.random_recipe import let_go, live_random_recipe, random_config, start_group
from benchmarks.on_gpu.stage import Section, Stage
from tests.support.recipe_runs import loop_of
from torchtune_adaptive.engine.memory.meter import device_memory_bytes
from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.engine.search.throughput import time_in_turns
from torchtune_adaptive.errors import InputError, NothingFitsError, reason_of
from torchtune_adaptive.plan.config_plan import ConfigLaunch, as_traced
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.trace.step_events import TracedStep
from torchtune_adaptive.plan.trace.tracer import Tracer
from torchtune_adaptive.settings import AdaptiveSettings

_NUM_ROWS = 4096
_SECONDS_FOR_ONE = 75.0  # a case is not begun with less than that left
TRACES_AT_ONCE = 6
SIZES = ["config", "memory", "planned", "found", "one more fits", "steps", "OOMs", "search, s", "peak / may use"]
SIZES += ["used", "peak / may use", "traced / measured peak"]
SPEEDS = ["config", "memory", "stock batch_size", "tokens/s", "used", "tokens/s", "ratio"]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Every config at every limit, as long as there is time."""
    start_group(stage)
    cases = [(name, limit_bytes) for limit_bytes in reversed(stage.limits_bytes) for name in stage.configs]
    sizes = Section(title="Sizes on cards of several memories", header=SIZES)
    speeds = Section(title="Throughput at the size used", header=SPEEDS, data=sizes.data)
    sizes.text.append(
        f"Rows of {stage.seq_len} random tokens, random weights, one process, no accumulation, margin 0.05. *planned*:"
        " by `tune-adaptive plan`, without a device; *found*: by the default search, and *used*: the power of two at"
        " or below it; *steps*: whole train steps of the search, its warm-up included; *peak / may use*: what the"
        " allocator reserved in the probes of the two sizes; *traced / measured peak*: of allocated bytes in the probe"
        " of the size used, with nothing added for the device."
    )
    speeds.text.append(
        "`use_maximum_batch_size=True` against the stock config's batch size, with the largest memory: medians of"
        " interleaved steps."
    )
    failed: list[str] = []
    with tracing_processes(stage) as pool:
        traced = {name: pool.submit(traced_step, config_of(stage, name, None), stage.seq_len) for name in stage.configs}
        for name, limit_bytes in tqdm(cases, desc="sizes", unit=" cases"):
            case = f"{name} at {stage.limit_text(limit_bytes)}"
            if stage.seconds_left < _SECONDS_FOR_ONE:
                sizes.text.append(f"Not measured, because no time was left: {case}.")
            else:
                try:
                    found = _case(stage, name, limit_bytes, traced[name])
                    sizes.data.append({"config": name, "limit_bytes": limit_bytes} | found)
                    sizes.rows.append([name, stage.limit_text(limit_bytes), *cells(found)])
                    if "tokens_per_second" in found:
                        speeds.rows.append([name, stage.limit_text(limit_bytes), *_speeds(found)])
                except Exception as error:  # keeps the other measurements
                    sizes.text.append(f"Failed: {case}: {reason_of(error)}.")
                    failed.append(case)
            yield [sizes, speeds] if speeds.rows else [sizes]
        for future in traced.values():
            future.cancel()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def config_of(stage: Stage, name: str, limit_bytes: int | None, **keys: Any) -> DictConfig:
    """The config of a search under ``limit_bytes``; None: the whole device."""
    cfg = random_config(stage, name, num_rows=_NUM_ROWS, use_maximum_batch_size=True, **keys)
    cfg.adaptive = {"memory_limit": limit_bytes}
    return cfg


def _case(stage: Stage, name: str, limit_bytes: int, traced: "Future[TracedStep]") -> dict[str, Any]:
    """What was found for one config under one limit."""
    whole = not stage.is_rehearsal and limit_bytes == device_memory_bytes(stage.device)
    cfg = config_of(stage, name, None if whole else limit_bytes)
    found: dict[str, Any] = {"stock_batch_size": int(cfg.batch_size)}
    try:
        recipe = live_random_recipe(cfg)
    except NothingFitsError as error:
        found["refused"] = str(error)
        error.__traceback__ = None  # which holds the model
        free_memory(stage.device)
    else:
        found |= searched(recipe, is_timed=limit_bytes == max(stage.limits_bytes) and not stage.is_simulated)
        let_go(recipe)
    return found | plan_of(stage, cfg, limit_bytes, traced, used=found.get("used"))


def searched(recipe: Any, *, is_timed: bool) -> dict[str, Any]:
    result = recipe.trainer.sizes.result
    exact, used = result.exact_batch_size, result.batch_size
    probes = {probe.batch_size: probe for probe in result.probes if probe.fits}
    found = {
        "exact": exact,
        "used": used,
        "bound": result.bound,
        "steps": 1 + len(result.probes),
        "ooms": sum(not one.fits for one in result.probes),
        "search_s": sum(one.seconds for one in result.probes),
        "exact_peak_bytes": probes[exact].peak_bytes,
        "used_peak_bytes": probes[used].peak_bytes,
        "allocated_peak_bytes": max(probes[used].phase_peak_bytes.values()),
        "usable_bytes": result.usable_bytes,
    }
    loop, make_batch = loop_of(recipe), probe_maker(recipe)
    if exact < result.bound:
        with real_steps(recipe, loop, limit_bytes=result.usable_bytes) as prober:
            found["one_more_fits"] = prober.fits(exact + 1)
    if is_timed:
        seq_len, sizes = recipe.trainer.sizes.seq_len, sorted({min(recipe.parts.batch_size, used), used})
        steps = {rows: [make_batch(rows)] for rows in sizes}
        timings = time_in_turns(loop, steps, num_tokens={rows: rows * seq_len for rows in sizes})
        found["tokens_per_second"] = {rows: one.rate for rows, one in timings.items()}
    return found


def tracing_processes(stage: Stage) -> ProcessPoolExecutor:
    """Processes for traces, which start a process group of their own, as a recipe does in this process."""
    return ProcessPoolExecutor(
        1 if stage.is_rehearsal else TRACES_AT_ONCE, mp_context=multiprocessing.get_context("spawn")
    )


def traced_step(cfg: DictConfig, seq_len: int) -> TracedStep:
    """The step of ``cfg`` on one rank, as a plan traces it."""
    return Tracer().step(as_traced(cfg, AdaptiveSettings.from_cfg(cfg)), world_size=1, seq_lens=[seq_len])


class Traced(Tracer):
    """Gives a plan the step that another process has traced."""

    def __init__(self, step: TracedStep) -> None:
        super().__init__()
        self._step = step

    def step(self, *_: Any, **__: Any) -> TracedStep:
        return self._step


def plan_of(
    stage: Stage, cfg: DictConfig, limit_bytes: int, traced: "Future[TracedStep]", *, used: int | None
) -> dict[str, Any]:
    """A plan for the limit once ``traced`` is done."""
    card_bytes = limit_bytes if stage.is_rehearsal else device_memory_bytes(stage.device)
    card = Card(name=stage.limit_text(card_bytes), memory_bytes=card_bytes)
    launch = ConfigLaunch(title="random weights", cfg=cfg, card=card, seq_lens=(stage.seq_len,))
    try:
        planned = launch.plan(Traced(traced.result()))
    except InputError as error:
        return {"not_planned": str(error)}
    (length,) = planned.lengths
    found: dict[str, Any] = {"planned": length.largest_batch_size, "certain": length.safe_batch_size}
    if used is not None:
        found["planned_bytes"] = planned.size(used).allocated_bytes
    return found


def cells(found: dict[str, Any]) -> list[str]:
    planned = str(found.get("planned", "refused"))
    if "refused" in found:
        return [planned, "0", *[""] * (len(SIZES) - 4)]
    planned_bytes, usable_bytes = found.get("planned_bytes"), found["usable_bytes"]
    return [
        planned,
        str(found["exact"]),
        {True: "yes", False: "no", None: "(all data)"}[found.get("one_more_fits")],
        str(found["steps"]),
        str(found["ooms"]),
        f"{found['search_s']:.1f}",
        f"{found['exact_peak_bytes'] / usable_bytes:.1%}",
        str(found["used"]),
        f"{found['used_peak_bytes'] / usable_bytes:.1%}",
        "" if planned_bytes is None else f"{planned_bytes / found['allocated_peak_bytes']:.4f}",
    ]


def _speeds(found: dict[str, Any]) -> list[str]:
    stock, used, rates = found["stock_batch_size"], found["used"], found["tokens_per_second"]
    if stock not in rates:
        return [str(stock), "does not fit", str(used), f"{rates[used]:.0f}", ""]
    return [str(stock), f"{rates[stock]:.0f}", str(used), f"{rates[used]:.0f}", f"{rates[used] / rates[stock]:.2f}"]

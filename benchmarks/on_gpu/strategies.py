"""The three strategies, and two of the RFC's sketches, on one model under one limit of a real allocator."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.on_gpu.observed import live_bytes
from benchmarks.on_gpu.random_recipe import live_recipe, random_config, start_group
from benchmarks.on_gpu.stage import Section, Stage
from benchmarks.peers.rfc import bisect, by_difference
from torchtune_adaptive.distributed.snapshot import leave_no_trace
from torchtune_adaptive.memory.out_of_memory import comes_from_out_of_memory, free_memory
from torchtune_adaptive.settings import STRATEGIES

_MOST_ROWS = 1024
_MARGIN = 0.05
HEADER = ["search", "size found", "whole steps", "OOMs", "seconds"]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """One after the other, on the same recipe."""
    start_group(stage)
    limit_bytes = stage.limits_bytes[-2]
    settings = {"memory_limit": limit_bytes, "margin": _MARGIN, "power_of_two": False}
    cfg = random_config(stage, stage.lora, num_rows=_MOST_ROWS, use_maximum_batch_size=True, adaptive=settings)
    recipe = live_recipe(stage, cfg)
    cells: list[list[str]] = []
    data: list[dict[str, Any]] = []
    text = [
        f"Config `{stage.lora}`, rows of {stage.seq_len} random tokens, limit {stage.said(limit_bytes)} of which"
        f" {_MARGIN:.0%} are held back, at most {_MOST_ROWS} rows. Ours warm up first and leave the model as it was; on"
        " CUDA the last two of them make a plan first, whose seconds count. The RFC's sketches are held to the same"
        f" limit: one bisects from {_MOST_ROWS} (100 000 in the RFC), one divides the limit by what a second row adds.",
    ]
    searches = {strategy: partial(_ours, recipe, cfg, strategy) for strategy in STRATEGIES}
    searches |= {"RFC: bisect": partial(_bisection, recipe), "RFC: difference": partial(_difference, recipe)}
    for name, search in searches.items():
        started = time.perf_counter()
        size, steps, ooms = search()
        seconds = time.perf_counter() - started
        cells.append([name, str(size), str(steps), str(ooms), f"{seconds:.1f}"])
        data.append({"search": name, "size": size, "steps": steps, "ooms": ooms, "seconds": seconds})
        yield [Section(title="Searches under one limit", header=HEADER, rows=cells, text=text, data=data)]


Answer = tuple[int, int, int]  # size found, whole steps, out-of-memory errors


def _ours(recipe: Any, cfg: Any, strategy: Any) -> Answer:
    recipe._adaptive = replace(recipe._adaptive, strategy=strategy)
    recipe._meter.exact = True
    result = recipe._search(cfg)
    ooms = sum(not probe.fits for probe in result.probes)
    return result.exact_batch_size, 1 + len(result.probes) - ooms, ooms


def _bisection(recipe: Any) -> Answer:
    steps = ooms = 0

    def is_oom(rows: int) -> bool:
        nonlocal steps, ooms
        failed = False
        try:
            with recipe._meter:
                recipe._probe_step(recipe._probe_window(rows, recipe._tokenizer.max_seq_len))
        except Exception as error:
            if not comes_from_out_of_memory(error):
                raise
            failed = True
        recipe._optimizer.zero_grad()
        free_memory(recipe._device)
        steps, ooms = steps + (not failed), ooms + failed
        return failed

    recipe._meter.limit_bytes = recipe._result.usable_bytes
    with leave_no_trace(recipe._model, [recipe._optimizer]):
        return bisect(is_oom, most=_MOST_ROWS), steps, ooms


def _difference(recipe: Any) -> Answer:
    def allocated_bytes(rows: int) -> int:
        """After the forward, while its activations are there."""
        batch = recipe._collated(recipe._probe_window(rows, recipe._tokenizer.max_seq_len)[0])
        batch = {name: values.to(recipe._device) for name, values in batch.items()}
        del batch["labels"]
        with recipe._meter:
            logits = recipe._model(**batch)
        allocated = live_bytes(recipe)
        del logits
        return allocated

    return by_difference(allocated_bytes, total_bytes=recipe._result.usable_bytes), 0, 0

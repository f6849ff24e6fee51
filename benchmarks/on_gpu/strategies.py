"""The three strategies, and two of the RFC's sketches, on one model under one limit of a real allocator."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.live import probe_maker, search_again
from benchmarks.on_gpu.random_recipe import live_random_recipe, random_config, start_group
from benchmarks.on_gpu.stage import Section, Stage
from tests.support.recipe_runs import loop_of
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.out_of_memory import comes_from_out_of_memory
from torchtune_adaptive.settings import STRATEGIES

_MOST_ROWS = 1024
_MARGIN = 0.05
HEADER = ["search", "size found", "whole steps", "OOMs", "seconds"]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Run the searches one after the other, on the same recipe."""
    start_group(stage)
    limit_bytes = stage.limits_bytes[-2]
    settings = {"memory_limit": limit_bytes, "margin": _MARGIN, "power_of_two": False}
    cfg = random_config(stage, stage.lora, num_rows=_MOST_ROWS, use_maximum_batch_size=True, adaptive=settings)
    recipe = live_random_recipe(cfg)
    loop = loop_of(recipe)
    cells: list[list[str]] = []
    data: list[dict[str, Any]] = []
    text = [
        f"Config `{stage.lora}`, rows of {stage.seq_len} random tokens, limit {stage.limit_text(limit_bytes)} of which"
        f" {_MARGIN:.0%} are kept free, at most {_MOST_ROWS} rows. The searches of this package warm up first and leave"
        " the model unchanged."
        f" The RFC's sketches are held to the same limit: one bisects from {_MOST_ROWS} (100 000 in the RFC), one"
        " divides the limit by what a second row adds.",
    ]
    searches: dict[str, Any] = {strategy: partial(_ours, strategy=strategy) for strategy in STRATEGIES}
    searches |= {"RFC: bisect": _bisection, "RFC: difference": _difference}
    for name, search in searches.items():
        started = time.perf_counter()
        size, steps, ooms = search(recipe, loop)
        seconds = time.perf_counter() - started
        cells.append([name, str(size), str(steps), str(ooms), f"{seconds:.1f}"])
        data.append({"search": name, "size": size, "steps": steps, "ooms": ooms, "seconds": seconds})
        yield [Section(title="Searches under one limit", header=HEADER, rows=cells, text=text, data=data)]


Answer = tuple[int, int, int]  # size found, whole steps, out-of-memory errors


def _ours(recipe: Any, loop: Loop, strategy: Any) -> Answer:
    result = search_again(recipe, loop, wanted_rows=recipe.parts.batch_size, strategy=strategy)
    ooms = sum(not probe.fits for probe in result.probes)
    return result.exact_batch_size, 1 + len(result.probes) - ooms, ooms


def _bisection(recipe: Any, loop: Loop) -> Answer:
    make_batch, meter = probe_maker(recipe), loop.meter_for_probes()
    steps = ooms = 0

    def is_oom(rows: int) -> bool:
        nonlocal steps, ooms
        with meter:
            failed = _is_out_of_memory(loop.step, make_batch(rows))
        loop.clean_up()
        steps, ooms = steps + (not failed), ooms + failed
        return failed

    with meter.exactly(), loop.restored():
        meter.limit_bytes = recipe.trainer.sizes.result.usable_bytes
        least, most = 0, _MOST_ROWS
        while least <= most:
            middle = (least + most) // 2
            least, most = (least, middle - 1) if is_oom(middle) else (middle + 1, most)
        return most, steps, ooms


def _is_out_of_memory(run: Callable[..., object], *args: Any) -> bool:
    try:
        run(*args)
    except Exception as error:
        if not comes_from_out_of_memory(error):
            raise
        return True
    return False


def _difference(recipe: Any, loop: Loop) -> Answer:
    make_batch, parts = probe_maker(recipe), recipe.parts
    meter: Any = loop.meter_for_probes()

    def allocated_bytes(rows: int) -> int:
        """The bytes allocated after the forward pass, while its activations are held."""
        batch = parts.step.collate(make_batch(rows)[0].rows)
        batch = {name: values.to(parts.step.device) for name, values in batch.items()}
        del batch["labels"]
        with meter:
            logits = parts.step.models[0](**batch)
        allocated = torch.cuda.memory_allocated() if parts.step.device.type == "cuda" else meter.live_bytes
        del logits
        return allocated

    of_a_row = allocated_bytes(2) - allocated_bytes(1)
    return recipe.trainer.sizes.result.usable_bytes // of_a_row, 0, 0

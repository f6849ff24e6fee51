"""What ``adaptive.objective=throughput`` chooses, and the speed of each size."""

from collections.abc import Iterator
from typing import Any

from benchmarks.on_gpu.random_recipe import let_go, live_random_recipe, random_config, start_group
from benchmarks.on_gpu.stage import Section, Stage

HEADER = ["config", "largest that fits", "chosen", "tokens/s by size (share of the best)", "set-up, s"]
_REPEATS = 2
_SECONDS_FOR_ONE = 15.0


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Each config a few times, for the choice depends on timed steps."""
    start_group(stage)
    text = [
        f"Rows of {stage.seq_len} random tokens, the whole memory, `adaptive.objective=throughput`, which takes the"
        " smallest size within 2 % of the best."
    ]
    section = Section(title="The batch size by throughput", header=HEADER, rows=[], text=text, data=[])
    for name in (stage.lora, stage.full):
        for _ in range(_REPEATS):
            if stage.seconds_left < _SECONDS_FOR_ONE:
                text.append(f"Not measured, because no time was left: {name}.")
                continue
            found = _chosen(stage, name)
            best = max(found["rates"].values())
            rates = ", ".join(f"{size}: {rate:.0f} ({rate / best:.1%})" for size, rate in found["rates"].items())
            cells = [found["largest"], found["chosen"], rates, f"{found['seconds']:.0f}"]
            section.rows.append([name, *map(str, cells)])
            section.data.append({"config": name} | found)
            yield [section]


def _chosen(stage: Stage, name: str) -> dict[str, Any]:
    limit_bytes = stage.limits_bytes[-1] if stage.is_rehearsal else None
    settings = {"objective": "throughput", "memory_limit": limit_bytes}
    cfg = random_config(stage, name, num_rows=4096, use_maximum_batch_size=True, adaptive=settings)
    left = stage.seconds_left
    recipe = live_random_recipe(cfg)
    sizes = recipe.trainer.sizes
    found = {
        "largest": sizes.result.exact_batch_size,
        "chosen": recipe.trainer.loader.batch_size,
        "rates": dict(sizes.tokens_per_second),
        "seconds": left - stage.seconds_left,
    }
    del sizes
    let_go(recipe)
    return found

"""A token budget against fixed rows on rows of very different lengths, with the same limit and the same samples."""

from collections.abc import Iterator

from benchmarks.on_gpu.random_recipe import live_random_recipe, random_config, start_group
from benchmarks.on_gpu.stage import Section, Stage
from benchmarks.tokens import ROUNDS, ROWS, TOKENS, Contestant, cells, compare_losses, race

_SAMPLES_PER_STEP = 64
HEADER = ["variant", "micro-batch", "micro-steps per step", "padding", "tokens/s", f"/ {ROWS}", "peak / limit"]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Both variants train in turn, on the same samples in each step."""
    start_group(stage)
    contestants = [_contestant(stage, name) for name in (ROWS, TOKENS)]
    for one in contestants:
        one.count()
        one.find_peak()
    race(contestants)
    compare_losses([one.losses for one in contestants], tolerance=1e-5 if stage.is_rehearsal else 1e-2)
    rows = [[one.name, *cells(one, contestants[0]), f"{one.peak:.0%}"] for one in contestants]
    data = [
        {"variant": one.name, "padding": one.padding, "speeds": one.speeds, "peak": one.peak} for one in contestants
    ]
    text = [
        f"Config `{stage.lora}`, limit {stage.limit_text(stage.limits_bytes[-2])}, rows of up to {stage.seq_len} random"
        f" tokens (log-normal, median a quarter of that), {_SAMPLES_PER_STEP} samples per optimizer step, one process,"
        f" {ROUNDS} rounds of one whole step of each in turn. Tokens are those that are no padding.",
    ]
    yield [Section(title="A token budget against fixed rows", header=HEADER, rows=rows, text=text, data=data)]


def _contestant(stage: Stage, name: str) -> Contestant:
    """A recipe whose sizes are found under the limit."""
    tokens = {"max_tokens_per_micro_batch": "auto"} if name == TOKENS else {}
    limit = {"memory_limit": stage.limits_bytes[-2]}
    settings = {"global_batch_size": _SAMPLES_PER_STEP, "power_of_two": False} | tokens | limit
    num_rows = (2 + ROUNDS) * _SAMPLES_PER_STEP
    keys = {"epochs": 1, "use_maximum_batch_size": name == ROWS, "adaptive": settings}
    cfg = random_config(stage, stage.lora, num_rows=num_rows, lengths_differ=True, **keys)
    return Contestant.of(name, live_random_recipe(cfg))

"""A token budget against fixed rows on rows of very different lengths, with the same limit and the same samples."""

from collections.abc import Iterator

from benchmarks.on_gpu.random_recipe import (
    apart,
    apart_text,
    let_go,
    live_random_recipe,
    random_config,
    start_group,
)
from benchmarks.on_gpu.stage import Section, Stage
from benchmarks.tokens import ROWS, TOKENS, Contestant, cells

_SAMPLES_PER_STEP = 64
_ROUNDS = 4  # after a first one with lazy set-up
HEADER = ["variant", "micro-batch", "micro-steps per step", "padding", "tokens/s", f"/ {ROWS}", "peak / limit"]
HEADER += ["allocator retries", "OOMs", "losses"]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Both variants train under the limit, one after the other, on the same samples in each step.

    Not in turn, because both in memory would each leave the other less than the limit.
    """
    start_group(stage)
    text = [
        f"Config `{stage.lora}`, limit {stage.limit_text(stage.limits_bytes[-2])}, rows of up to {stage.seq_len} random"
        f" tokens (log-normal, median a quarter of that), {_SAMPLES_PER_STEP} samples per optimizer step, one process,"
        f" {_ROUNDS} timed steps under the limit; the learning rate is 0. Tokens are those that are no padding. *peak*:"
        " of allocated bytes; *allocator retries*: how often the allocator freed its cache in these steps, which takes"
        " time; *losses*: how far those of a step are apart, relative to fixed rows.",
    ]
    section = Section(title="A token budget against fixed rows", header=HEADER, rows=[], text=text, data=[])
    contestants: list[Contestant] = []
    for name in (ROWS, TOKENS):
        one, retries, ooms = _trained(stage, name)
        contestants.append(one)
        losses_are = apart_text(apart(one.losses, contestants[0].losses))
        figures = [f"{one.peak:.0%}", str(retries), str(ooms), losses_are]
        section.rows.append([one.name, *cells(one, contestants[0]), *figures])
        data = {"variant": one.name, "padding": one.padding, "speeds": one.speeds, "peak": one.peak}
        section.data.append(data | {"retries": retries, "ooms": ooms, "losses": one.losses})
        yield [section]


def _trained(stage: Stage, name: str) -> tuple[Contestant, int, int]:
    """A variant that has trained on every step, its allocator retries and its out-of-memory errors."""
    tokens = {"max_tokens_per_micro_batch": "auto"} if name == TOKENS else {}
    limit = {"memory_limit": stage.limits_bytes[-2]}
    settings = {"global_batch_size": _SAMPLES_PER_STEP, "power_of_two": False} | tokens | limit
    num_rows = (2 + _ROUNDS) * _SAMPLES_PER_STEP
    keys = {"epochs": 1, "use_maximum_batch_size": name == ROWS, "adaptive": settings}
    cfg = random_config(stage, stage.lora, num_rows=num_rows, lengths="random", **keys)
    recipe = live_random_recipe(cfg)
    one, trainer = Contestant.of(name, recipe, rounds=_ROUNDS), recipe.trainer
    one.count()
    trainer.step.meter.reset()
    for place in range(1 + _ROUNDS):
        with trainer.step.meter:
            one.train(place)
    one.peak = max(trainer.step.meter.phase_peak_bytes.values()) / stage.limits_bytes[-2]
    retries, ooms = trainer.step.meter.allocator_retries, trainer.recoverable.retries
    one = one.figures()
    del trainer
    let_go(recipe)
    return one, retries, ooms

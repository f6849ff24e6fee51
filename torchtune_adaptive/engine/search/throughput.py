"""Time train steps that are alternatives to each other."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.devices import wait_for
from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.engine.search.timing import Key, Timing

_ROUNDS, _FEWEST_ROUNDS = 5, 3
_LONG_S = 15.0  # counted rounds that take longer are fewer
_CLEARLY_SLOWER = 1.5


def time_in_turns(
    loop: Loop, steps: Mapping[Key, Sequence[Any]], *, num_tokens: Mapping[Key, int]
) -> dict[Key, Timing]:
    """Time alternatives, all of which must fit: a few rounds, in each of which all alternatives run in turn.

    Unlike in probes, there is no meter and no vote, because both cost time. The first round, which selects kernels and
    creates the optimizer's state, is not counted. An alternative that is clearly slower than the best runs once.
    Restores all state. A collective; all ranks get the same figures.

    Args:
        steps: by alternative, the optimizer steps of a round, each as its micro-batches. The first alternative needs
            the least memory.
        num_tokens: by alternative, the tokens of these steps over all ranks.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in steps}
    with loop.restored():
        # The state must not lie within memory that is cached for a large step: see `MicroBatcher.start_small`.
        loop.step(next(iter(steps.values()))[0])
        loop.clean_up()
        running = list(steps)
        rounds = Bar(range(1 + _ROUNDS), desc="timing", disable=loop.consensus.rank != 0)
        for number in rounds:
            own = [_time_steps(loop, steps[key]) for key in running]
            slowest = map(max, zip(*loop.consensus.from_all_ranks(own), strict=True))
            if number == 0:
                continue
            for key, taken_s in zip(running, slowest, strict=True):
                seconds[key].append(taken_s)
            per_token = {key: seconds[key][-1] / num_tokens[key] for key in running}
            running = [key for key in running if per_token[key] < _CLEARLY_SLOWER * min(per_token.values())]
            if number >= _FEWEST_ROUNDS and sum(map(sum, seconds.values())) > _LONG_S:
                break
        loop.clean_up()
    return {key: Timing(tuple(taken), num_tokens[key]) for key, taken in seconds.items()}


def _time_steps(loop: Loop, steps: Sequence[Any]) -> float:
    wait_for(loop.device)
    started = time.perf_counter()
    for micro_batches in steps:
        loop.step(micro_batches)
    wait_for(loop.device)
    return time.perf_counter() - started

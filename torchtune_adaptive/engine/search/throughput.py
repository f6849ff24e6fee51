"""Time train steps that are alternatives to each other."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchtune_adaptive.engine.distributed.ledger import CollectiveStateUnknownError
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.devices import wait_for
from torchtune_adaptive.engine.memory.out_of_memory import comes_from_out_of_memory
from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.engine.search.timing import Key, Timing
from torchtune_adaptive.errors import NothingFitsError

_ROUNDS, _FEWEST_ROUNDS = 5, 3
_LONG_S = 15.0  # counted rounds that take longer are fewer
_CLEARLY_SLOWER = 1.5


def time_in_turns(
    loop: Loop, steps: Mapping[Key, Sequence[Any]], *, num_tokens: Mapping[Key, int]
) -> dict[Key, Timing]:
    """Time alternatives, all of which must fit: a few rounds, in each of which all alternatives run in turn.

    Unlike in probes, there is no meter and no vote, because both cost time. The first round, which selects kernels and
    creates the optimizer's state, is not counted, and ranks vote in it: an alternative for which memory runs out after
    all is left out. One process leaves it out in later rounds too. An alternative that is clearly slower than the best
    runs once. Restores all state. A collective; all ranks get the same figures.

    Args:
        steps: by alternative, the optimizer steps of a round, each as its micro-batches. The first alternative needs
            the least memory.
        num_tokens: by alternative, the tokens of these steps over all ranks.

    Raises:
        NothingFitsError: memory runs out for all alternatives.
        CollectiveStateUnknownError: memory runs out in a later round, on one of several ranks. This process must end.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in steps}
    with loop.restored():
        # The state must not lie within memory that is cached for a large step: see `MicroBatcher.start_small`.
        _time_steps(loop, next(iter(steps.values()))[:1], votes=True)
        loop.clean_up()
        running = list(steps)
        rounds = Bar(range(1 + _ROUNDS), desc="timing", disable=loop.consensus.rank != 0)
        for number in rounds:
            own = {key: _time_steps(loop, steps[key], votes=number == 0) for key in running}
            for key in [key for key, taken_s in own.items() if taken_s is None]:
                del own[key], seconds[key]
            running = list(own)
            if not running:
                break
            slowest = map(max, zip(*loop.consensus.from_all_ranks(list(own.values())), strict=True))
            if number == 0:
                continue
            for key, taken_s in zip(running, slowest, strict=True):
                seconds[key].append(taken_s)
            per_token = {key: seconds[key][-1] / num_tokens[key] for key in running}
            running = [key for key in running if per_token[key] < _CLEARLY_SLOWER * min(per_token.values())]
            if number >= _FEWEST_ROUNDS and sum(map(sum, seconds.values())) > _LONG_S:
                break
        loop.clean_up()
    if not seconds:
        raise NothingFitsError("memory runs out in each train step that is timed, although it had fitted.")
    return {key: Timing(tuple(taken), num_tokens[key]) for key, taken in seconds.items()}


def _time_steps(loop: Loop, steps: Sequence[Any], *, votes: bool) -> float | None:
    """The seconds of ``steps``; None if memory runs out, which several ranks must vote on."""
    taken_s: list[float] = []

    def work() -> None:
        wait_for(loop.device)
        started = time.perf_counter()
        for micro_batches in steps:
            loop.step(micro_batches)
        wait_for(loop.device)
        taken_s.append(time.perf_counter() - started)

    if not votes and loop.consensus.world_size > 1:
        try:
            work()
        except Exception as error:
            if not comes_from_out_of_memory(error):
                raise
            raise CollectiveStateUnknownError(
                "memory ran out while train steps were timed, and the other ranks wait for this one"
            ) from error
    elif not loop.run_together(work):
        loop.clean_up()
        return None
    return taken_s[0]

"""The two batch sizes of a PPO turn: answers generated at once, and answers trained on at once."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torchtune import utils

from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.search.find import search
from torchtune_adaptive.engine.search.options import SearchOptions
from torchtune_adaptive.engine.search.strategies import SearchResult
from torchtune_adaptive.engine.search.tables import probe_table, summary

log = utils.get_logger("DEBUG")


@dataclass(frozen=True, kw_only=True)
class TurnSizes:
    """The largest sizes that divide a turn's answers evenly, and the searches that found them.

    Attributes:
        generated: number of answers generated at once.
        trained: number of answers in a micro-step of training.
        searches: the searches, by "generated" and "trained".
        seq_len: tokens per row.
    """

    generated: int
    trained: int
    searches: dict[str, SearchResult]
    seq_len: int


def find_turn_sizes(
    loop: Loop, options: SearchOptions, *, answers: int, answers_per_step: int, seq_len: int
) -> TurnSizes:
    """Find both sizes, each while the other one is 1, because generation and training peak at different times.

    Restores all state, as ``search`` does. A collective.

    Args:
        loop: its step is a turn. It takes both sizes, generated and trained, and uses the longest rows.
        answers: answers generated in a turn.
        answers_per_step: answers of an optimizer step.
        seq_len: tokens per row, for the log.

    Raises:
        NothingFitsError: generation of, or training on, a single answer does not fit.
    """
    options = replace(options, power_of_two=False)

    def largest(what: str, sizes: Callable[[int], tuple[int, int]], total: int) -> tuple[int, SearchResult]:
        found = search(loop, lambda size: [sizes(size)], options, start=1, bound=total)
        size = largest_divisor(total, at_most=found.exact_batch_size)
        utils.log_rank_zero(
            log, f"Answers {what} at once: {size} of {total}\n{probe_table(found)}\n{summary(found, seq_len)}"
        )
        return size, found

    trained, trained_search = largest("trained on", lambda size: (1, size), answers_per_step)
    generated, generated_search = largest("generated", lambda size: (size, 1), answers)
    searches = {"generated": generated_search, "trained": trained_search}
    return TurnSizes(generated=generated, trained=trained, searches=searches, seq_len=seq_len)


def largest_divisor(total: int, *, at_most: int) -> int:
    """The largest divisor of ``total`` that is at most ``at_most``.

    >>> [largest_divisor(12, at_most=size) for size in (12, 11, 5, 1)]
    [12, 6, 4, 1]
    """
    return next(size for size in range(min(total, at_most), 0, -1) if total % size == 0)

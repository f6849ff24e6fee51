"""Change one setting after the other, and keep what trains faster."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtune_adaptive.engine.search.timing import Timing, is_as_good, simplest_near_best
from torchtune_adaptive.fastest.changes import Change, Question
from torchtune_adaptive.text import format_bytes, text_table

AS_IT_IS = "as it is"
_STEADY = 0.05  # spread of the times of a set-up on a machine whose speed hardly varies


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one set-up of the recipe showed.

    Attributes:
        words: what was changed in the config.
        values: the changed keys.
        timings: by micro-batch, the config's own first; empty if nothing was timed.
        is_short_of_memory: whether memory bounds the micro-batch, or not one row fits.
        peak_bytes: of the largest micro-batch that was tried and fits.
        planned: the largest micro-batch by the plan, in rows; None if it was not planned.
        found: the largest micro-batch by the search, in rows.
        seconds: of the whole set-up.
        why_not: why nothing was timed, as a sentence; "" if it was.
        folder: the set-up's own output folder.
    """

    words: str = AS_IT_IS
    values: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Timing] = field(default_factory=dict)
    is_short_of_memory: bool = False
    peak_bytes: int = 0
    planned: int | None = None
    found: int | None = None
    seconds: float = 0.0
    why_not: str = ""
    folder: Path = Path()

    @property
    def micro_batch(self) -> str:
        """The one that is used: the simplest of those near the best."""
        return simplest_near_best(self.timings)

    @property
    def timing(self) -> Timing:
        """The timing of the micro-batch that is used."""
        return self.timings[self.micro_batch]


@dataclass
class Climb:
    """From a config as it is to settings that train it faster, by one change at a time.

    Attributes:
        measure: sets a run up with a change's words and values, and times it.
        plan: says how many rows fit with these values, by a plan; None if that is not known.
        seconds: no set-up begins that would probably end later.
        outcomes: all that was tried, and what was not; the first is the config as it is.
        best: of the outcomes; the config as it is, if nothing could be timed.
    """

    measure: Callable[[str, Mapping[str, Any]], Outcome]
    plan: Callable[[Mapping[str, Any]], int | None]
    seconds: float
    outcomes: list[Outcome] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)
    _finalists: list[Outcome] = field(default_factory=list)  # the best two, if they were measured again

    @property
    def best(self) -> Outcome:
        """The fastest, unless something simpler is as fast; the simplest came first."""
        timed = self._finalists or [one for one in self.outcomes if one.timings]
        if not timed:
            return self.outcomes[0]
        best, *others = timed
        for other in others:
            if not is_as_good(best.timing, other.timing):
                best = other
        return best

    def run(self, questions: Sequence[Question]) -> None:
        """Measure the config as it is, and then the alternatives of each question, on top of the best so far.

        If not one row fits as it is, what needs less memory is tried; if the config fails otherwise, nothing is. If the
        times of the best two vary, both are measured again, one right after the other, and that counts.
        """
        as_it_is = self.measure(AS_IT_IS, {})
        self.outcomes.append(as_it_is)
        if not as_it_is.timings and not as_it_is.is_short_of_memory:
            return
        for question in questions:
            base = self.best
            is_needed = True
            for change in question.alternatives:
                outcome = self._tried(change, base, is_needed=is_needed)
                self.outcomes.append(outcome)
                if question.ends_with_memory and outcome.timings and not outcome.is_short_of_memory:
                    is_needed = False
        self._play_off()

    def _play_off(self) -> None:
        """Measure the best two again, if their times vary and there is time."""
        best = self.best
        if not (others := [one for one in self.outcomes if one.timings and one is not best]):
            return
        finalists = sorted((best, max(others, key=lambda one: one.timing.rate)), key=self.outcomes.index)
        is_steady = all(one.timing.spread <= _STEADY for one in finalists)
        if is_steady or not self._has_time(sum(one.seconds for one in finalists)):
            return
        again = [replace(self.measure(one.words, one.values), planned=one.planned) for one in finalists]
        if all(one.timings for one in again):
            self._finalists = again
            self.outcomes = [again[finalists.index(one)] if one in finalists else one for one in self.outcomes]

    def _has_time(self, seconds: float) -> bool:
        return time.monotonic() - self._started + seconds <= self.seconds

    def _tried(self, change: Change, base: Outcome, *, is_needed: bool) -> Outcome:
        words = change.words if base.words == AS_IT_IS else f"{base.words}, {change.words}"
        values = {**base.values, **change.values}
        if not is_needed or (change.memory == "less" and not base.is_short_of_memory):
            return Outcome(words=words, values=values, why_not="not tried: memory is not short")
        if not base.timings and change.memory != "less":
            return Outcome(words=words, values=values, why_not="not tried: it would not save memory")
        if not self._has_time(max(one.seconds for one in self.outcomes)):
            return Outcome(words=words, values=values, why_not="not tried: no time left")
        planned = self.plan(values) if change.memory == "more" else None
        if planned == 0:
            return Outcome(words=words, values=values, planned=0, why_not="not tried: by the plan not one row fits")
        return replace(self.measure(words, values), planned=planned)


def times(outcome: Outcome, as_it_is: Outcome) -> str:
    """How many times as fast as the config with its own micro-batch; "" if that was not timed."""
    own = next(iter(as_it_is.timings.values()), None)
    return "" if own is None else f"{outcome.timing.rate / own.rate:.2f}"


def summary(outcomes: Sequence[Outcome], best: Outcome) -> str:
    """A table of the config as it is and of each set-up with its fastest micro-batch; below it what was not timed.

    At least one outcome has timings.

    >>> steps = {"4 rows": Timing((2.0,), 200), "512 tokens": Timing((1.0,), 200)}
    >>> as_it_is, other = Outcome(timings=steps, found=8), Outcome(words="compile", why_not="it failed")
    >>> print(summary([as_it_is, other], as_it_is))
    settings  micro-batch  tokens/s  times  peak  rows that fit  planned  chosen
    --------  -----------  --------  -----  ----  -------------  -------  ------
    as it is       4 rows       100   1.00
    as it is   512 tokens       200   2.00   0 B              8              yes
    <BLANKLINE>
    - compile: it failed
    """
    first, timed = outcomes[0], [one for one in outcomes if one.timings]
    rows = [["settings", "micro-batch", "tokens/s", "times", "peak", "rows that fit", "planned", "chosen"]]
    if first.timings:
        own, timing = next(iter(first.timings.items()))
        rows.append([AS_IT_IS, own, f"{timing.rate:.0f}", "1.00", "", "", "", ""])
    for one in timed:
        found, planned = ("" if number is None else str(number) for number in (one.found, one.planned))
        figures = [f"{one.timing.rate:.0f}", times(one, first), format_bytes(one.peak_bytes)]
        rows.append([one.words, one.micro_batch, *figures, found, planned, "yes" if one is best else ""])
    others = [f"- {one.words}: {one.why_not}" for one in outcomes if one not in timed]
    table = "\n".join(line.rstrip() for line in text_table(rows, num_names=1).splitlines())
    return "\n".join([table, *([""] if others else []), *others])

"""One change after the other is kept if it trains faster than what is simpler."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torchtune_adaptive.engine.search.timing import Timing
from torchtune_adaptive.fastest import climb as climb_module
from torchtune_adaptive.fastest.changes import Change, Question
from torchtune_adaptive.fastest.climb import Climb, Outcome, summary

LESS = Change("none", {"ac": 0})
SOME = Change("some", {"ac": 2})
ALL = Change("all", {"ac": 1}, "less")
COMPILE = Change("compile", {"compile": True}, "same")
CHECKPOINTING = Question("checkpointing", (LESS, SOME), ends_with_memory=True)
COMPILING = Question("compile", (COMPILE,))


class Recipe:
    """Stands for a recipe with ``rates`` by what is changed, and ``short`` of memory with some changes."""

    def __init__(
        self,
        rates: Mapping[str, float],
        *,
        short: tuple[str, ...] = (),
        set_up_s: float = 1.0,
        again: Mapping[str, float] | None = None,
        too_large: tuple[str, ...] = (),
    ) -> None:
        self.rates, self.short, self.set_up_s = rates, short, set_up_s
        self.too_large = too_large
        self.again = again  # the rates of what is measured a second time, if the first times vary
        self.now_s = 0.0
        self.measured: list[str] = []

    def measure(self, words: str, values: Mapping[str, Any]) -> Outcome:
        self.now_s += self.set_up_s
        self.measured.append(words)
        if words not in self.rates:
            is_short = words in self.too_large
            return Outcome(
                words=words, values=values, seconds=self.set_up_s, why_not="it failed", is_short_of_memory=is_short
            )
        is_again = self.measured.count(words) > 1 and self.again is not None
        rate = self.again[words] if is_again and self.again else self.rates[words]
        seconds = (1.0, 1.0, 1.0) if self.again is None else (0.9, 1.0, 1.1)
        timings = {"4 rows": Timing(seconds, 50), "8 rows": Timing(seconds, int(rate))}
        is_short = words in self.short
        return Outcome(
            words=words, values=values, timings=timings, is_short_of_memory=is_short, seconds=self.set_up_s, found=8
        )


def climbed(
    recipe: Recipe,
    *questions: Question,
    planned: Mapping[str, int] | None = None,
    seconds: float = 100.0,
) -> Climb:
    with mock.patch.object(climb_module, "time", SimpleNamespace(monotonic=lambda: recipe.now_s)):
        climb = Climb(recipe.measure, lambda values: (planned or {}).get(str(values.get("ac"))), seconds, _started=0.0)
        climb.run(questions)
    return climb


def reasons(climb: Climb) -> dict[str, str]:
    return {one.words: one.why_not for one in climb.outcomes if one.why_not}


def test_each_change_is_tried_on_top_of_the_best_so_far() -> None:
    recipe = Recipe({"as it is": 100, "none": 130, "none, compile": 200})
    climb = climbed(recipe, CHECKPOINTING, COMPILING)
    assert recipe.measured == ["as it is", "none", "none, compile"]
    assert (climb.best.words, climb.best.micro_batch) == ("none, compile", "8 rows")
    assert climb.best.values == {"ac": 0, "compile": True}
    assert reasons(climb) == {"some": "not tried: memory is not short"}


def test_the_best_two_are_measured_again_if_times_vary() -> None:
    rates = {"as it is": 200, "none": 100, "some": 40}
    recipe = Recipe(rates, short=("none",), again={"as it is": 100, "none": 150})
    climb = climbed(recipe, CHECKPOINTING, planned={"0": 7})
    assert recipe.measured == ["as it is", "none", "some", "as it is", "none"]
    assert (climb.best.words, climb.best.timing.rate, climb.best.planned) == ("none", 150, 7)
    assert [one.timing.rate for one in climb.outcomes] == [100, 150, 50]  # of `some` with 4 rows
    no_time = Recipe(rates, short=("none",), again={})
    assert climbed(no_time, CHECKPOINTING, seconds=4.0).best.words == "as it is"
    assert no_time.measured == ["as it is", "none", "some"]


def test_what_is_not_faster_than_the_spread_is_not_kept() -> None:
    recipe = Recipe({"as it is": 100, "none": 101, "compile": 102})
    climb = climbed(recipe, CHECKPOINTING, COMPILING)
    assert recipe.measured == ["as it is", "none", "compile"]
    assert climb.best.words == "as it is"


def test_where_memory_is_short_the_next_alternative_is_tried_as_well() -> None:
    recipe = Recipe({"as it is": 100, "none": 90, "some": 120}, short=("as it is", "none", "some"))
    climb = climbed(recipe, CHECKPOINTING, Question("more", (ALL,)))
    assert recipe.measured == ["as it is", "none", "some", "some, all"]
    assert climb.best.words == "some"
    plenty = climbed(Recipe({"as it is": 100}), Question("more", (ALL,)))
    assert reasons(plenty) == {"all": "not tried: memory is not short"}


def test_what_cannot_fit_by_the_plan_is_not_set_up() -> None:
    recipe = Recipe({"as it is": 100, "some": 110})
    climb = climbed(recipe, CHECKPOINTING, planned={"0": 0, "2": 7})
    assert recipe.measured == ["as it is", "some"]
    assert reasons(climb) == {"none": "not tried: by the plan not one row fits"}
    assert [one.planned for one in climb.outcomes] == [None, 0, 7]


def test_a_set_up_that_fails_costs_only_itself() -> None:
    recipe = Recipe({"as it is": 100, "compile": 120})
    climb = climbed(recipe, CHECKPOINTING, COMPILING)
    assert reasons(climb) == {"none": "it failed", "some": "it failed"}
    assert climb.best.words == "compile"


def test_where_the_config_as_it_is_cannot_be_timed_nothing_else_is_tried() -> None:
    recipe = Recipe({})
    climb = climbed(recipe, CHECKPOINTING, COMPILING)
    assert recipe.measured == ["as it is"]
    assert climb.outcomes[0].why_not == "it failed"


def test_where_not_one_row_fits_what_needs_less_memory_is_tried_first() -> None:
    recipe = Recipe({"all": 100, "all, compile": 150}, too_large=("as it is",))
    climb = climbed(recipe, CHECKPOINTING, Question("more", (ALL,)), COMPILING)
    assert recipe.measured == ["as it is", "all", "all, compile"]
    assert climb.best.words == "all, compile"
    assert reasons(climb)["none"] == "not tried: it would not save memory"
    first, second = [line.split() for line in summary(climb.outcomes, climb.best).splitlines()[2:4]]
    assert (first[0], second[:-1]) == ("all", ["all,", "compile", "8", "rows", "150", "0", "B", "8"])
    nothing = climbed(Recipe({}, too_large=("as it is",)), Question("more", (ALL,)))
    assert nothing.best is nothing.outcomes[0]
    assert nothing.best.timings == {}


def test_no_set_up_begins_that_would_probably_end_too_late() -> None:
    recipe = Recipe({"as it is": 100, "none": 130, "none, compile": 200}, set_up_s=40.0)
    climb = climbed(recipe, CHECKPOINTING, COMPILING, seconds=100.0)
    assert recipe.measured == ["as it is", "none"]
    assert reasons(climb)["none, compile"] == "not tried: no time left"
    assert climb.best.words == "none"

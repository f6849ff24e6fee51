"""The schedule never exceeds the maximum, never shrinks the batch, and reports every bad answer before training."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.schedule import at_epochs, geometric, linear
from torchtune_adaptive.training.batch.increase_function import (
    check_function,
    function_name,
    next_batch_size,
    plan_growth,
)

HERE = __name__


def eight_at_epoch_two(epoch: int, current_batch_size: int) -> int:
    return 8 if epoch == 2 else 0


def answering(answer):
    """A function of this module, named `answers`, that always returns ``answer``."""

    def answers(epoch: int, current_batch_size: int):
        return answer

    answers.__qualname__ = "answers"
    return answers


class Doubling:
    """Counts its calls, as a stateful schedule may."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        self.calls += 1
        return current_batch_size if self.calls > 1 else 0

    def grow(self, epoch: int, current_batch_size: int) -> int:
        return self(epoch, current_batch_size)


class Uncopyable(Doubling):
    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


# ---- the RFC's rule


@pytest.mark.parametrize(
    ("epoch", "maximum", "batch_size", "increment", "reason"),
    [
        (2, 24, 24, 8, "epoch 2: increase of 8 granted, batch_size 16 -> 24"),
        (2, 20, 16, 8, "epoch 2: increase of 8 refused, 16 + 8 = 24 is above the maximum of 20"),
        (1, 20, 16, 0, "epoch 1: no increase, batch_size stays 16"),
    ],
)
def test_an_increase_is_granted_up_to_the_maximum_and_refused_entirely_above_it(
    epoch, maximum, batch_size, increment, reason
):
    growth = next_batch_size(eight_at_epoch_two, epoch=epoch, batch_size=16, maximum=maximum)
    assert (growth.batch_size, growth.increment, growth.reason) == (batch_size, increment, reason)


# ---- answers


@pytest.mark.parametrize("answer", [np.uint8(4), 4])
def test_integers_of_any_type_are_answers_and_become_int(answer):
    growth = next_batch_size(answering(answer), epoch=0, batch_size=4, maximum=8)
    assert growth.batch_size == 8
    assert type(growth.increment) is int


@pytest.mark.parametrize(
    ("answer", "rule", "quoted"),
    [
        (0.5, "an integer", "0.5"),
        (None, "an integer", "None"),
        (True, "an integer", "True"),
        (np.bool_(True), "an integer", repr(np.bool_(True))),
        (np.float32(2), "an integer", repr(np.float32(2))),
        ("two\nlines", "an integer", "'two\\nlines'"),
        (-4, "at least 0", "-4"),
    ],
)
def test_bad_answer_is_refused_quoting_value_epoch_and_function(answer, rule, quoted):
    with pytest.raises(InputError) as caught:
        next_batch_size(answering(answer), epoch=2, batch_size=16, maximum=99)
    assert str(caught.value) == (
        f"`batch_increase_function` must return {rule}, but {HERE}.answers returned {quoted} "
        "at epoch 2 with batch size 16 instead."
    )


def raises_at_three(epoch: int, current_batch_size: int) -> int:
    return 8 // (epoch - 3) * 0


def test_raising_function_is_refused_quoting_its_error():
    with pytest.raises(InputError) as caught:
        plan_growth(raises_at_three, total_epochs=9, batch_size=4)
    assert str(caught.value) == (
        f"`batch_increase_function` must return an integer, but {HERE}.raises_at_three raised an error "
        "at epoch 3 with batch size 4 instead: ZeroDivisionError: integer division or modulo by zero."
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# ---- the check at load


class OneArgument:
    def __call__(self, epoch: int) -> int:
        return 0


def keyword_only(*, epoch, current_batch_size):
    return 0


def three_arguments(epoch, current_batch_size, maximum):
    return 0


@pytest.mark.parametrize(
    "function",
    [
        Doubling(),
        Doubling().grow,
        lambda *arguments: 0,
        functools.partial(three_arguments, maximum=8),
        max,  # a builtin whose signature cannot be read
        geometric(),
    ],
)
def test_whatever_takes_two_positional_arguments_passes_the_check(function):
    assert check_function(function) is function


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (keyword_only, "(*, epoch, current_batch_size)"),
        (three_arguments, "(epoch, current_batch_size, maximum)"),
        (OneArgument(), "(epoch: int) -> int"),
    ],
)
def test_wrong_arity_is_refused_quoting_the_signature(function, signature):
    with pytest.raises(InputError) as caught:
        check_function(function)
    assert str(caught.value) == (
        "`batch_increase_function` must take two positional arguments (epoch, current_batch_size), "
        f"but {function_name(function)} takes {signature} instead."
    )


@pytest.mark.parametrize(
    ("value", "name", "subject"), [(8, None, "is 8"), (3.14, "'math.pi'", "'math.pi' is 3.14"), (None, None, "is None")]
)
def test_a_value_that_is_not_callable_is_refused(value, name, subject):
    with pytest.raises(InputError) as caught:
        check_function(value, name=name)
    assert str(caught.value) == f"`batch_increase_function` must be callable, but {subject} instead."


@pytest.mark.parametrize("kind", [geometric, Doubling])
def test_class_in_place_of_a_function_is_refused(kind):
    with pytest.raises(InputError) as caught:
        check_function(kind, name="a.b")
    assert str(caught.value) == (
        "`batch_increase_function` must be a function, but a.b is a class instead; "
        "to use a class, give it as `_component_`, with its arguments."
    )


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (Doubling(), f"{HERE}.Doubling"),
        (Doubling().grow, f"{HERE}.Doubling.grow"),
        (functools.partial(three_arguments, maximum=8), f"{HERE}.three_arguments"),
        (max, "builtins.max"),
        ({}.get, "builtins.dict.get"),
        (at_epochs({1: 8}), "torchtune_adaptive.schedule.at_epochs(increases={1: 8})"),
    ],
)
def test_function_name_is_readable(function, name):
    assert function_name(function) == name


# ---- planned growth


@pytest.mark.parametrize("method", ["__call__", "grow"])
def test_planned_growth_does_not_change_a_stateful_function(method):
    doubling = Doubling()
    sizes = plan_growth(getattr(doubling, method), total_epochs=3, batch_size=4)
    assert sizes == [4, 8, 16]
    assert doubling.calls == 0


def test_function_that_cannot_be_copied_is_called_itself():
    uncopyable = Uncopyable()
    assert plan_growth(uncopyable, total_epochs=2, batch_size=4) == [4, 8]
    assert uncopyable.calls == 2


def test_planned_growth_without_a_bound_survives_a_long_doubling():
    assert len(plan_growth(lambda epoch, size: int(size * 1.0), total_epochs=2000, batch_size=8)) == 2000


@given(
    answers=st.lists(st.integers(0, 100), min_size=1, max_size=20), start=st.integers(1, 64), room=st.integers(-9, 200)
)
def test_planned_sizes_never_grow_above_the_maximum_and_never_shrink(answers, start, room):
    sizes = plan_growth(
        lambda epoch, _: answers[epoch], total_epochs=len(answers), batch_size=start, maximum=start + room
    )
    for before, size, answer in zip([start, *sizes], sizes, answers, strict=False):
        assert size == before + (answer if before + answer <= start + room else 0)


# ---- built-in schedules


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (geometric(), [4, 8, 16, 32, 64]),
        (geometric(factor=3, every_epochs=2), [4, 4, 12, 12, 36]),
        (linear(2), [4, 6, 8, 10, 12]),
        (linear(increment=5, every_epochs=3), [4, 4, 4, 9, 9]),
        (at_epochs({0: 3}), [7, 7, 7, 7, 7]),
        (at_epochs({1: 4, "3": 8}), [4, 8, 8, 16, 16]),  # pyright: ignore[reportArgumentType]  # as YAML may have it
    ],
)
def test_built_in_schedules_grow_when_they_say(function, sizes):
    assert plan_growth(function, total_epochs=5, batch_size=4) == sizes


@pytest.mark.parametrize(
    ("schedule", "arguments", "sentence"),
    [
        (geometric, {"factor": 1}, "`factor` must be at least 2, but is 1 instead."),
        (geometric, {"factor": 1.5}, "`factor` must be an integer, but is 1.5 instead."),
        (geometric, {"every_epochs": 0}, "`every_epochs` must be at least 1, but is 0 instead."),
        (linear, {"increment": -8}, "`increment` must be at least 0, but is -8 instead."),
        (linear, {"increment": 8, "every_epochs": None}, "`every_epochs` must be an integer, but is None instead."),
        (at_epochs, {"increases": [2, 8]}, "`increases` must map epochs to increases, but is [2, 8] instead."),
        (at_epochs, {"increases": {}}, "`increases` must map epochs to increases, but is {} instead."),
        (at_epochs, {"increases": {"two": 8}}, "`epoch of increases` must be an integer, but is 'two' instead."),
        (at_epochs, {"increases": {-1: 8}}, "`epoch of increases` must be at least 0, but is -1 instead."),
        (at_epochs, {"increases": {2: -8}}, "`increases[2]` must be at least 0, but is -8 instead."),
        (
            at_epochs,
            {"increases": {2: 8, "2": 4}},
            "`increases` must name epoch 2 once, but is {2: 8, '2': 4} instead.",
        ),
    ],
)
def test_bad_argument_of_a_built_in_schedule_is_refused(schedule, arguments, sentence):
    with pytest.raises(InputError) as caught:
        schedule(**arguments)
    assert str(caught.value) == sentence

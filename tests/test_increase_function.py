"""`batch_increase_function` is found by its path or made by a component, and refused if it cannot be called."""

import functools
import math
import sys
from typing import Any

import pytest

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.increase_function import function_name, load_function
from torchtune_adaptive.schedule import at_epochs, geometric, gradient_noise_scale

HERE = __name__
SCHEDULE = "torchtune_adaptive.schedule"


def grow_by_two(epoch: int, current_batch_size: int) -> int:
    return 2


def with_maximum(epoch, current_batch_size, maximum):
    return 0


def keyword_only(*, epoch, current_batch_size):
    return 0


def break_down(**arguments):
    raise RuntimeError("first line\nsecond line")


class Doubling:
    def __call__(self, epoch: int, current_batch_size: int) -> int:
        return current_batch_size

    def grow(self, epoch: int, current_batch_size: int) -> int:
        return current_batch_size


DOUBLING = Doubling()
UP_TO_EIGHT = functools.partial(with_maximum, maximum=8)


def make(name: str) -> Any:
    return globals().get(name)


@pytest.mark.parametrize(
    ("value", "function"),
    [
        (None, None),
        (f"{HERE}.grow_by_two", grow_by_two),
        (f"{HERE}.DOUBLING", DOUBLING),
        (f"{HERE}.DOUBLING.grow", DOUBLING.grow),
        (f"{HERE}.UP_TO_EIGHT", UP_TO_EIGHT),
        ("builtins.max", max),  # whose signature cannot be read
        ({"_component_": f"{SCHEDULE}.geometric", "every_epochs": 3}, geometric(every_epochs=3)),
        ({"_component_": f"{HERE}.make", "name": "grow_by_two"}, grow_by_two),
    ],
)
def test_whatever_takes_two_positional_arguments_is_found(value, function):
    assert load_function(value) == function


def test_function_of_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_growth.py").write_text("def gentle(epoch, size):\n    return epoch\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    function = load_function("my_growth.gentle")
    assert function is not None
    assert function(7, 1) == 7


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("no_such.grow", "cannot be imported from 'no_such.grow': ModuleNotFoundError: No module named 'no_such'."),
        ("", "cannot be imported from '': ValueError: invalid format: ''."),
        ("math.pi", f"must be callable, but 'math.pi' is {math.pi} instead."),
        (
            f"{SCHEDULE}.geometric",
            f"must be a function, but '{SCHEDULE}.geometric' is a class instead; give it as `_component_`, with its"
            " arguments.",
        ),
        *(
            (f"{HERE}.{name}", f"must take (epoch, current_batch_size), but '{HERE}.{name}' takes {signature} instead.")
            for name, signature in (
                ("with_maximum", "(epoch, current_batch_size, maximum)"),
                ("keyword_only", "(*, epoch, current_batch_size)"),
            )
        ),
        *(
            (value, f"must be a dotted path or a mapping with a `_component_`, but is {value!r} instead.")
            for value in (8, {"factor": 2})
        ),
        *(
            ({"_component_": path, **arguments}, f"cannot be created by '{path}' with {arguments}: {reason}.")
            for path, arguments, reason in (
                (f"{SCHEDULE}.geometric", {"factor": 1}, "`factor` must be at least 2, but is 1 instead"),
                (f"{HERE}.break_down", {}, "RuntimeError: first line second line"),
            )
        ),
        (
            {"_component_": f"{HERE}.make", "name": "nothing"},
            f"must be callable, but the result of '{HERE}.make' is None instead.",
        ),
    ],
)
def test_a_function_that_is_not_there_or_cannot_be_called_is_refused(value, sentence):
    with pytest.raises(InputError) as refused:
        load_function(value)
    assert str(refused.value) == f"`batch_increase_function` {sentence}"


def test_what_would_end_the_program_is_refused(tmp_path, monkeypatch):
    (tmp_path / "ends_on_import.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"from 'ends_on_import.grow': SystemExit \(ends_on_import.py, line 1\)"):
        load_function("ends_on_import.grow")
    with pytest.raises(InputError, match=r"by 'sys.exit' with {}: SystemExit \("):
        load_function({"_component_": "sys.exit"})


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (DOUBLING, f"{HERE}.Doubling"),
        (DOUBLING.grow, f"{HERE}.Doubling.grow"),
        (UP_TO_EIGHT, f"{HERE}.with_maximum"),
        (max, "builtins.max"),
        ({}.get, "builtins.dict.get"),
        (at_epochs({1: 8}), "torchtune_adaptive.schedule.at_epochs(increases={1: 8})"),
        (
            gradient_noise_scale(),
            "torchtune_adaptive.schedule.gradient_noise_scale(max_factor=2, every_steps=4, smoothing=0.99,"
            " min_measurements=8)",
        ),
    ],
)
def test_function_name_is_readable(function, name):
    assert function_name(function) == name

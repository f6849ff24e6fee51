"""A step's events with more layers and more rows, against the events of a program that has so many."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.trace.events import BEFORE, Event, Events, extended, with_bytes_of
from torchtune_adaptive.plan.trace.step_events import StepEvents

FEWEST_LAYERS, PERIOD = 4, 2  # as in a plan, where two sorts of layers may alternate
properties = settings(max_examples=60)


class Memory:
    """Records what a program takes and gives back."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.phase = BEFORE

    def take(self, operation: str, num_bytes: int, kind: str = "activations") -> int:
        self.events.append(Event(self.phase, operation, kind, num_bytes))
        return len(self.events) - 1

    def give(self, operation: str, *taken: int) -> None:
        for one in taken:
            self.events.append(Event(self.phase, operation, self.events[one].kind, 0, taken=one))


@dataclass(frozen=True)
class Program:
    """A train step: what it takes in each sort of layer, and before and after the layers.

    Attributes:
        sorts: bytes that each sort of layer keeps for backward; layer n is of sort n modulo their number.
        ends: bytes that are taken before and after the layers.
        more_at_first: bytes that the first layer also keeps.
        frees_previous: a layer frees what the one before it has returned.
        as_lists: the optimizer goes through all layers with each operation, not with all operations through each layer.
    """

    sorts: list[list[int]]
    ends: tuple[int, int]
    more_at_first: list[int]
    frees_previous: bool
    as_lists: bool

    def events(self, num_layers: int) -> Events:
        memory = Memory()
        layers = [self.sorts[number % len(self.sorts)] for number in range(num_layers)]
        for sizes in layers:
            for size in sizes:
                memory.take("mark 1", size, "parameters")
        memory.phase = "forward"
        first = memory.take("embedding", self.ends[0])
        kept: list[list[int]] = []
        returned = -1
        for number, sizes in enumerate(layers):
            own = [memory.take(f"mm {place}", size) for place, size in enumerate(sizes)]
            own += [memory.take("first", size) for size in (self.more_at_first if number == 0 else [])]
            before, returned = returned, memory.take("add", 7)
            if self.frees_previous and before >= 0:
                memory.give("mm 0", before)
            elif before >= 0:
                own.append(before)
            kept.append(own)
        last = memory.take("output", self.ends[1])
        memory.phase = "backward"
        gradients: list[list[int]] = []
        for sizes, own in zip(reversed(layers), reversed(kept), strict=True):
            gradients.append([memory.take("mm", size, "gradients") for size in sizes])
            memory.give("mul", *reversed(own))
        memory.give("sum", first, last, returned)
        norms = memory.take("stack", 4 * num_layers)  # of all layers
        memory.phase = "optimizer"
        if self.as_lists:
            squares = [memory.take("foreach_mul", 8) for _ in layers]
            memory.give("foreach_sqrt", *squares)
        for own in reversed(gradients):
            memory.give("zero_grad", *own)
        memory.give("end", norms)
        return tuple(memory.events)


amounts = st.integers(1, 300)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    size = draw(st.integers(1, 4))
    layers = st.lists(amounts, min_size=size, max_size=size)
    return Program(
        sorts=draw(st.lists(layers, min_size=1, max_size=PERIOD)),
        ends=(draw(amounts), draw(amounts)),
        more_at_first=draw(st.lists(amounts, max_size=3)),
        frees_previous=draw(st.booleans()),
        as_lists=draw(st.booleans()),
    )


@properties
@given(programs(), st.integers(0, PERIOD - 1), st.integers(0, 30))
def test_the_events_of_many_layers_follow_from_those_of_few(program: Program, more: int, periods: int) -> None:
    few = FEWEST_LAYERS + more
    found = extended(program.events(few), program.events(few + PERIOD), periods)
    assert found == program.events(few + periods * PERIOD)


def without(*indices: int) -> Callable[[Events], Events]:
    """A function that leaves events out that nothing refers to."""
    return lambda events: tuple(one for index, one in enumerate(events) if index - len(events) not in indices)


PLAIN = Program(sorts=[[10, 20]], ends=(5, 6), more_at_first=[], frees_previous=False, as_lists=False)


@pytest.mark.parametrize(
    "change",
    {
        "an event less at the end": without(-1),
        "another operation": lambda events: (*events[:-1], events[-1]._replace(operation="another")),
        "another phase": lambda events: tuple(one._replace(phase="loss") for one in events),
        "other memory is given back": lambda events: (*events[:-1], events[-1]._replace(taken=events[-2].taken)),
        "fewer events than with fewer layers": lambda events: events[:20],
    }.items(),
    ids=lambda change: change[0],
)
def test_steps_that_do_not_follow_from_each_other_have_no_others(
    change: tuple[str, Callable[[Events], Events]],
) -> None:
    few, more = PLAIN.events(4), PLAIN.events(6)
    assert extended(few, more, 3) is not None
    assert extended(few, change[1](more), 3) is None


@properties
@given(programs(), st.integers(2, 50))
def test_other_bytes_of_few_layers_give_those_of_more(program: Program, rows: int) -> None:
    wider = replace(
        program,
        sorts=[[rows * size for size in sizes] for sizes in program.sorts],
        ends=(rows * program.ends[0], rows * program.ends[1]),
        more_at_first=[rows * size for size in program.more_at_first],
    )
    few, more = program.events(4), program.events(6)
    assert with_bytes_of(wider.events(4), few, more) == wider.events(6)
    assert with_bytes_of(program.events(5), few, more) is None


def test_bytes_that_depend_on_layers_and_rows_do_not_give_those_of_more() -> None:
    def stacked(num_layers: int, num_rows: int) -> Events:
        layers = [Event("forward", "mm", "activations", num_rows)] * num_layers
        return (*layers, Event("forward", "stack", "activations", num_layers * num_rows))

    assert with_bytes_of(stacked(4, 3), stacked(4, 2), stacked(6, 2)) is None


# ---- rows


def rows(number: int, *, loops: bool = False) -> Events:
    """A step whose activations grow with its rows; two loops over the rows keep 100 bytes in each pass."""
    memory = Memory()
    memory.take("", 1000, "parameters")
    memory.phase = "forward"
    kept = [memory.take("mm", 50 * number)]
    for name in ("row", "row of another loop"):
        for _ in range(number if loops else 1):
            kept.append(memory.take(name, 100))
            memory.give(name, memory.take(f"part of a {name}", 30))
        kept += [memory.take(f"cat {place}", 8) for place in range(8)]
    memory.phase = "backward"
    for one in reversed(kept):
        memory.give(f"{memory.events[one].operation}, backward", one)
    return tuple(memory.events)


@pytest.mark.parametrize("loops", [False, True])
def test_the_events_of_many_rows_follow_from_those_of_few(loops: bool) -> None:
    for number in (2, 3, 4, 100):
        assert extended(rows(2, loops=loops), rows(3, loops=loops), number - 2) == rows(number, loops=loops)


def test_a_batch_follows_from_the_nearest_traced_ones_that_are_smaller() -> None:
    """As a loss that works on tiles: up to 4 rows it grows by 10 bytes with each, from 5 on by 1."""

    def tiled(rows: int) -> Events:
        return (Event("forward", "mm", "activations", 10 * rows if rows < 5 else 100 + rows),)

    step = StepEvents(0, {rows: (tiled(rows),) for rows in (1, 2, 3, 5, 6)})
    assert all(step.at(rows) == tiled(rows) for rows in range(1, 20))


@pytest.mark.parametrize(
    ("of_rows", "follows"),
    [
        (lambda rows: 1000 * rows**2, lambda rows: 1000 * rows**2),
        (lambda rows: (2048 + 700 * rows) ** 2, lambda rows: (2048 + 700 * rows) ** 2),
        (lambda rows: rows * (rows - 1) // 2, lambda rows: rows * (rows - 1) // 2),
        (lambda rows: 128 * -(-rows * 2000 // 128), lambda rows: 6016 + (rows - 3) * 2048),  # rounded up: a line
    ],
)
def test_three_sizes_tell_what_grows_with_the_square(
    of_rows: Callable[[int], int], follows: Callable[[int], int]
) -> None:
    step = StepEvents(0, {rows: ((Event("forward", "mm", "activations", of_rows(rows)),),) for rows in (2, 3, 4)})
    assert [step.at(rows)[0].num_bytes for rows in (5, 100)] == [follows(5), follows(100)]


def test_a_batch_whose_memory_does_not_follow_is_refused_in_one_sentence() -> None:
    def shrinking(number: int) -> Events:
        return (Event("forward", "mm", "activations", 10 - 3 * number),)

    step = StepEvents(0, {number: (shrinking(number),) for number in (1, 2, 3)})
    assert step.at(3) == shrinking(3)
    with pytest.raises(
        InputError, match=r"^A batch of 4 cannot be planned: its memory does not follow .* of 2 and 3\.$"
    ):
        step.at(4)

"""How weights come onto a GPU, one after the other: what that takes and gives back decides where they lie.

A load is what happens until one more weight is there. Its events begin at 0; memory that it does not give back is the
weight's.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from torchtune_adaptive.plan.trace.events import BEFORE, WEIGHTS, Event, Events

_LONGEST_LOOP = 24  # events of a pass


def load(kept: Iterable[int], *, temporary: Sequence[int] = ()) -> Events:
    """The load of a weight whose tensors have so many bytes.

    Args:
        temporary: bytes of each tensor that is taken before them, and given back after, the last one first.
    """
    taken = [Event(BEFORE, "loading", "temporaries", num_bytes) for num_bytes in (*temporary, *kept)]
    given_back = (Event(BEFORE, "loading", "temporaries", 0, taken=index) for index in reversed(range(len(temporary))))
    return (*taken, *given_back)


def without_loops(events: Events) -> Events:
    """The events of a load, with one pass of each loop that gives back all it takes: more passes leave nothing else.

    >>> one_pass = Event(BEFORE, "loading", "temporaries", 8), Event(BEFORE, "loading", "temporaries", 0, taken=0)
    >>> again = one_pass[0], one_pass[1]._replace(taken=2)
    >>> without_loops((*one_pass, *again)) == one_pass
    True
    """
    found, start = list(events), 0
    while start < len(found):
        length = next((length for length in range(2, _LONGEST_LOOP) if _is_repeated(found, start, length)), 0)
        if not length:
            start += 1
            continue
        later = found[start + 2 * length :]
        moved = (one._replace(taken=one.taken - length) if one.taken > start else one for one in later)
        found[start + length :] = moved
    return tuple(found)


def _is_repeated(events: Sequence[Event], start: int, length: int) -> bool:
    """Whether so many events give back all they take, and the same ones follow."""
    one, other = events[start : start + length], events[start + length : start + 2 * length]
    given_back = sorted(event.taken for event in one if event.taken >= 0)
    taken = [start + place for place, event in enumerate(one) if event.taken < 0]
    return given_back == taken and other == [
        event._replace(taken=event.taken + length) if event.taken >= 0 else event for event in one
    ]


def with_more_layers(few: Sequence[Events], more: Sequence[Events], periods: int) -> list[Events]:
    """The loads of a model with so many periods of layers more than ``few``. ``more`` has one more.

    >>> ends, layer = (load([1]), load([5])), load([3])
    >>> grown = with_more_layers([ends[0], layer, ends[1]], [ends[0], layer, layer, ends[1]], 3)
    >>> [one[0].num_bytes for one in grown]
    [1, 3, 3, 3, 3, 5]
    """
    pairs = zip(few, more, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), len(few))
    period = more[place : place + len(more) - len(few)]
    return [*few[:place], *(one for _ in range(periods) for one in period), *few[place:]]


def arranged(events: Events, loads: Sequence[Events]) -> Events:
    """The events of a step, with weights in the order of ``loads``, and with what these take for a time.

    Weights are known by their bytes. Those that are not in ``loads`` follow.

    >>> weights = Event(BEFORE, "mark 1", "parameters", 4), Event(BEFORE, "mark 1", "parameters", 2)
    >>> [event.num_bytes for event in arranged(weights, [load([2], temporary=[8])])]
    [8, 2, 0, 4]
    """
    if not loads:
        return events
    waiting = defaultdict[int, deque[int]](deque)  # weights by their bytes
    for index, event in enumerate(events):
        if event.phase == BEFORE and event.kind in WEIGHTS and event.taken < 0:
            waiting[event.num_bytes].append(index)
    found, places = list[Event](), dict[int, int]()

    def move(index: int) -> None:
        event = events[index]
        places[index] = len(found)
        found.append(event._replace(taken=places[event.taken]) if event.taken >= 0 else event)

    for one in loads:
        given_back, taken = {event.taken for event in one}, dict[int, int]()
        for place, event in enumerate(one):
            if event.taken >= 0:
                found.append(event._replace(taken=taken[event.taken]))
            elif place in given_back:
                taken[place] = len(found)
                found.append(event)
            elif waiting[event.num_bytes]:
                move(waiting[event.num_bytes].popleft())
    for index in range(len(events)):
        if index not in places:
            move(index)
    return tuple(found)

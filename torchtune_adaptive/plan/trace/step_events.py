"""The memory of a train step at any number of rows, from traces of a few rows and layers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.host_memory import HostFigures
from torchtune_adaptive.plan.trace.events import Event, Events, extended, with_setup, with_squares
from torchtune_adaptive.plan.trace.loading import arranged, with_more_layers


@dataclass(frozen=True)
class StepEvents:
    """The events of a step with rows of ``seq_len`` tokens.

    Attributes:
        seq_len: 0 if the step is that of a user's loop, whose samples need not be rows of tokens.
        traced: events of the steps that were traced, by their rows. Those of other rows follow from two of them, or
            from three, the smallest of more than one row: they tell what grows with the square of the rows. Of
            each step: the events with all layers; or with few, and with a period of layers more.
        periods: of layers that the whole model has more than the first of the traced ones.
        state_exists: the optimizer's state is there before the first step, as after a search.
        setup: what is taken and given back a single time, after the weights: before the first step or the second.
        loads: of the weights, see ``loading.py``: with all layers; or with few, and with a period more. () if weights
            come one after the other, and nothing else.
    """

    seq_len: int
    traced: Mapping[int, tuple[Events, ...]]
    periods: int = 0
    state_exists: bool = True
    setup: Events = ()
    loads: tuple[Sequence[Events], ...] = ()
    _found: dict[int, Events] = field(default_factory=dict, init=False, repr=False, compare=False)  # of the traced rows

    def at(self, batch_size: int) -> Events:
        """The events of a step of ``batch_size`` rows with all layers.

        Raises:
            InputError: they do not follow from those that were traced, as something would be smaller than nothing.
        """
        whole = self._whole(batch_size)
        if whole is None:
            small, large = self._nearest(batch_size)
            raise InputError(
                f"A batch of {batch_size} cannot be planned: its memory does not follow from that of {small} and"
                f" {large}."
            )
        few, *more = self.loads or [()]
        loads = with_more_layers(few, more[0], self.periods) if more else few
        return arranged(with_setup(whole, self.setup), loads)

    def follows(self, batch_size: int) -> bool:
        """Whether the step of ``batch_size`` rows follows from those that were traced."""
        return self._whole(batch_size) is not None

    def as_json(self) -> dict[str, Any]:
        """The events as JSON values."""
        return {"seq_len": self.seq_len, "traced": self.traced, "periods": self.periods, "loads": self.loads}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "StepEvents":
        """The events from the value of ``as_json``."""
        traced = {int(rows): tuple(map(_events_of, steps)) for rows, steps in content["traced"].items()}
        loads = tuple([*map(_events_of, of_model)] for of_model in content["loads"])
        return cls(content["seq_len"], traced, content["periods"], loads=loads)

    def _whole(self, batch_size: int) -> Events | None:
        if batch_size in self._found:
            return self._found[batch_size]
        if batch_size in self.traced:
            few, *more = self.traced[batch_size]
            whole = extended(few, more[0], self.periods) if more else few
            if whole is not None:
                self._found[batch_size] = whole
            return whole
        small, large = self._nearest(batch_size)
        few, more = self._whole(small), self._whole(large)
        if few is None or more is None:
            return None
        whole = extended(few, more, batch_size - small)
        fewest = self._whole(small - 1) if small > 2 and small - 1 in self.traced else None
        if whole is None or fewest is None:
            return whole
        return with_squares(whole, [fewest, few, more], batch_size - small)

    def _nearest(self, batch_size: int) -> tuple[int, int]:
        """The two traced sizes that ``batch_size`` follows from: the last ones that differ by a row and are smaller."""
        pairs = list(pairwise(sorted(self.traced)))
        return next((pair for pair in reversed(pairs) if pair[1] == pair[0] + 1 < batch_size), pairs[-1])


def _events_of(content: list[Any]) -> Events:
    return tuple(Event(*one) for one in content)


@dataclass(frozen=True)
class TracedStep:
    """Events of a step by row length, with figures of the model.

    Attributes:
        num_layers: the trained model's layers; 0 if their number is not known.
        traced_layers: number of layers of each traced model: small models, or the whole model; () if not known.
        num_parameters: parameters of all models, over all ranks.
        paged_bytes: a rank's optimizer state in paged memory, which is not counted as the device's.
        num_frozen_parameters: the part of ``num_parameters`` in models that are not trained (reference or teacher).
        sequences: sequences per row of the batch; two for a pair of answers.
        images, tiles: images of a row, and tiles of an image.
        host: figures for host memory.
    """

    lengths: tuple[StepEvents, ...]
    num_parameters: int
    num_layers: int = 0
    traced_layers: tuple[int, ...] = ()
    paged_bytes: int = 0
    num_frozen_parameters: int = 0
    sequences: int = 1
    images: int = 0
    tiles: int = 0
    host: HostFigures = field(default_factory=HostFigures)

    def as_json(self) -> dict[str, Any]:
        """The step as JSON values."""
        return vars(self) | {"lengths": [step.as_json() for step in self.lengths], "host": asdict(self.host)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TracedStep":
        """The step from the value of ``as_json``."""
        lengths = tuple(map(StepEvents.from_json, content["lengths"]))
        host = HostFigures(**content["host"])
        return cls(**content | {"lengths": lengths, "traced_layers": tuple(content["traced_layers"]), "host": host})

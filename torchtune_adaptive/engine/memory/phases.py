"""The phase that a train step is in: forward, loss, backward and so on."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchtune_adaptive.engine.memory.meter import MemoryMeter


class Phases:
    """Tracks the current phase of a train step, and reports it to a meter.

    Forward hooks on the models enter "forward" and "loss". So the code that calls the models, such as a user's loss
    function, does not have to report its phase. All other phases are entered by ``enter``.

    Attributes:
        now: the current phase, "" before the first one.
    """

    def __init__(self, models: Sequence[nn.Module], meter: MemoryMeter | None) -> None:
        self._meter = meter
        self.now = ""
        self._handles: list[RemovableHandle] = []
        for model in itertools.chain.from_iterable(map(_called, models)):
            # First of the pre-hooks and last of the hooks: FSDP2's own, which gather parameters, belong to "forward".
            self._handles += [
                model.register_forward_pre_hook(_Entering(self, "forward"), prepend=True),
                model.register_forward_hook(_Entering(self, "loss")),
            ]

    def enter(self, name: str) -> None:
        """Start phase ``name``, for example "backward"."""
        self.now = name
        if self._meter is not None:
            self._meter.enter_phase(name)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class _Entering:
    """A hook that enters a phase. In a copy of the model, also a pickled one, it does nothing."""

    def __init__(self, phases: Phases | None, name: str) -> None:
        self._phases = phases
        self._name = name

    def __call__(self, *_: object) -> None:
        if self._phases is not None:
            self._phases.enter(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Entering, (None, self._name)


@contextmanager
def phases_by_hooks(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], enter: Callable[[str], None]
) -> Iterator[None]:
    """Call ``enter`` with the phases of any train step: "forward", "backward" (with the loss), "optimizer"."""
    handles: list[RemovableHandle] = []
    for one in _called(model):
        handles.append(one.register_forward_pre_hook(lambda *_: enter("forward"), prepend=True))  # before FSDP2's
        handles.append(one.register_forward_hook(lambda *_: enter("backward")))
    hooked = [one for one in optimizers if hasattr(one, "_optimizer_step_pre_hooks")]  # not in every wrapper
    handles += [one.register_step_pre_hook(lambda *_: enter("optimizer")) for one in hooked]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _called(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward passes are those of ``model``: each of several models in a ``ModuleList``."""
    return list(model) if isinstance(model, nn.ModuleList) else [model]

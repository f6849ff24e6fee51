"""The phase that a train step is in: forward, loss, backward and so on."""

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
        for model in models:
            self._handles += _hook(model, _Entering(self, "forward"), _Entering(self, "loss"))

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
    handles = _hook(model, lambda *_: enter("forward"), lambda *_: enter("backward"))
    hooked = [one for one in optimizers if hasattr(one, "_optimizer_step_pre_hooks")]  # not in every wrapper
    handles += [one.register_step_pre_hook(lambda *_: enter("optimizer")) for one in hooked]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(model: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list[RemovableHandle]:
    """Call ``before`` and ``after`` around the forward passes of ``model``, or of each one in a ``ModuleList``.

    First of the pre-hooks and last of the hooks: FSDP2's own, which gather parameters, belong to the forward pass.
    """
    handles: list[RemovableHandle] = []
    for one in model if isinstance(model, nn.ModuleList) else [model]:
        handles.append(one.register_forward_pre_hook(before, prepend=True))
        handles.append(one.register_forward_hook(after))
    return handles

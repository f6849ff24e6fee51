"""Gradient checkpointing of a transformers model, switched layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

_EVERY = (4, 2)  # one layer in so many


@dataclass(frozen=True)
class Checkpointing:
    """Which layers are checkpointed.

    Attributes:
        words: for a table.
        switch: makes it so.
        needs_less: of memory than what comes before it: of use only if that is short of memory.
    """

    words: str
    switch: Callable[[], None]
    needs_less: bool = False


class ChosenCheckpointing:
    """The checkpointing that was chosen for a training, and the one before."""

    def __init__(self) -> None:
        self._chosen: Checkpointing | None = None
        self._before: Checkpointing | None = None

    def ways_of(self, model: nn.Module) -> list[Checkpointing]:
        """Ways to checkpoint ``model``, the present one first."""
        ways = alternatives(model)
        self._before = ways[0]
        return ways

    def choose(self, way: Checkpointing) -> None:
        self._chosen = way
        way.switch()

    def keep(self) -> None:
        """Switch to the chosen one again: DPO's loss leaves all layers checkpointed if some were."""
        if self._chosen is not None:
            self._chosen.switch()

    def restore(self) -> None:
        """Switch to the one before."""
        if self._before is not None:
            self._before.switch()
        self._chosen = None


def alternatives(model: nn.Module) -> list[Checkpointing]:
    """Ways to checkpoint a model: first as it is; then, in the order of their memory, none, some layers and all."""
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    are_on = [layer.gradient_checkpointing for layer in layers]

    def switch(chosen: Sequence[bool]) -> None:
        for layer, is_on in zip(layers, chosen, strict=True):
            layer.gradient_checkpointing = is_on
            if is_on and not hasattr(layer, "_gradient_checkpointing_func"):
                vars(layer)["_gradient_checkpointing_func"] = partial(checkpoint, use_reentrant=False)

    none, every = (False,) * len(layers), (True,) * len(layers)
    found = {tuple(are_on): "as it is"}
    found.setdefault(none, "no checkpointing")
    for number in _EVERY:
        some = tuple(place % number == 0 for place in range(len(layers)))
        found.setdefault(some, f"one layer in {number} checkpointed")
    found.setdefault(every, "all layers checkpointed")
    return [
        Checkpointing(words, partial(switch, chosen), needs_less=any(chosen) and words != "as it is")
        for chosen, words in found.items()
    ]

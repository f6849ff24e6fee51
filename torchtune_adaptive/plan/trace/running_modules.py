"""Which module of a model runs, in the forward and the backward pass."""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from torchtune_adaptive.training.checkpoints.tensors import without_wrappers

_AUTOGRAD: Any = torch.autograd
WHOLE_MODEL = "model"
_FROZEN_MODEL = "frozen model"


class RunningModules:
    """Names the module that runs within ``with modules:``, the innermost one if modules call each other.

    In the backward pass it is the module whose forward pass created the autograd node. Nodes are numbered in order of
    creation, so that a module's nodes lie between its start and its end. ``torch.utils.module_tracker`` sets hooks on
    tensors instead. Such hooks keep tensors alive, which changes the peak. They also see a module's start in the
    backward pass only if all its inputs need gradients.

    Both passes must run on the thread that entered ``with modules:``, as the backward pass on a CPU does. Other threads
    are ignored, because each has its own node numbers. A layer's compiled code is traced on such a thread.

    Args:
        models: the trained one first. A module that is in none of them counts as the loss.
        optimizers: of the trained model.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._names: dict[nn.Module, list[str]] = {}  # several if layers share the module
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}  # by id of a parameter or a buffer
        for index, model in enumerate(models):
            root = _FROZEN_MODEL if index else WHOLE_MODEL
            for name, module in model.named_modules(remove_duplicate=False):
                path = without_wrappers(name)
                full_name = f"{root}.{path}" if index and path else path or root
                self._names.setdefault(module, []).append(full_name)
                self._own(module, full_name)
        self._running: list[str] = []
        self._starts: list[int] = []  # number of the first autograd node that belongs to a module
        self._started: list[str] = []  # its name, "" if none
        self._handles: list[RemovableHandle] = []
        self._thread = threading.get_ident()

    def now(self, phase: str) -> str:
        """The module that runs in ``phase`` of a step. Outside of the model: "batch", "loss" or the phase's name."""
        if self._running:
            return self._running[-1]
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return self._maker_of(node) or "loss"
        # FSDP2 reduces the gradients of parameters outside of layers after the last node.
        return {"": WHOLE_MODEL, "forward": "batch", "backward": WHOLE_MODEL}.get(phase, phase)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Parameters (also as modules saw them in the forward pass), buffers and optimizer state, with module names."""
        yield from self._tensors.values()
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                name, _ = self._tensors.get(id(parameter), ("optimizer", None))
                yield name, state

    def __enter__(self) -> "RunningModules":
        # A recomputed forward pass ends by an exception as soon as the backward pass has what it needs.
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(lambda module, _: self._enter(module)),
            register_module_forward_hook(lambda *_: self._leave(), always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module) -> None:
        if threading.get_ident() != self._thread:
            return
        above = self._running[-1] if self._running else ""
        names = self._names.get(module)
        if names is None:
            self._start(above or "loss")
            return
        name = next((name for name in names if name.startswith(f"{above}.")), names[0])
        self._own(module, name)
        self._start(name)

    def _leave(self) -> None:
        if threading.get_ident() != self._thread:
            return
        self._running.pop()
        self._note()

    def _start(self, name: str) -> None:
        self._running.append(name)
        self._note()

    def _note(self) -> None:
        self._starts.append(_AUTOGRAD._get_sequence_nr())
        self._started.append(self._running[-1] if self._running else "")

    def _own(self, module: nn.Module, name: str) -> None:
        """Name the module's own tensors. With FSDP2 they differ within and outside of the forward pass."""
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            self._tensors.setdefault(id(tensor), (name, tensor))

    def _maker_of(self, node: Any) -> str:
        """The module whose forward pass created ``node``, "" if none did."""
        if node.name() == "torch::autograd::AccumulateGrad":
            name, _ = self._tensors.get(id(node.variable), (WHOLE_MODEL, None))
            return name
        place = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._started[place] if place >= 0 else ""

"""Which module of a model runs, in forward and in backward."""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from torchtune_adaptive.checkpoints.tensors import without_wrappers

_AUTOGRAD: Any = torch.autograd
WHOLE_MODEL = "model"
_FROZEN_MODEL = "frozen model"


class RunningModules:
    """Names the module that runs inside ``with modules:``, the innermost if it was called by others.

    In backward that is the module whose forward made the autograd node. Nodes are numbered in the order in which they
    are made, so that those of a module lie between its start and its end. ``torch.utils.module_tracker`` sets hooks on
    tensors instead. These keep tensors alive, so that the peak is another, and know a module's start in backward only
    if all its inputs need gradients. Forward and backward must run on the thread that entered ``with modules:``, as
    backward on a CPU does. What other threads run is left out, because each numbers nodes for itself: a layer's
    compiled code is traced on one.

    Args:
        models: the trained one first; a module outside of them is the loss.
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
        self._starts: list[int] = []  # number of the first autograd node from which on a module runs
        self._started: list[str] = []  # its name, "" if none
        self._handles: list[RemovableHandle] = []
        self._thread = threading.get_ident()

    def now(self, phase: str) -> str:
        """The module that runs in ``phase`` of a step; "batch", "loss" or another phase's name outside of the model."""
        if self._running:
            return self._running[-1]
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return self._maker_of(node) or "loss"
        # FSDP2 reduces the gradients of what is in no layer after the last node.
        return {"": WHOLE_MODEL, "forward": "batch", "backward": WHOLE_MODEL}.get(phase, phase)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Parameters (as a module's forward saw them too), buffers and optimizer state, each with its module's name."""
        yield from self._tensors.values()
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                name, _ = self._tensors.get(id(parameter), ("optimizer", None))
                yield name, state

    def __enter__(self) -> "RunningModules":
        # A checkpointed forward is left by an exception as soon as backward has what it needs.
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
        """Name the module's own tensors. In forward those of FSDP2 are not the ones that it has outside."""
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            self._tensors.setdefault(id(tensor), (name, tensor))

    def _maker_of(self, node: Any) -> str:
        """The module whose forward made ``node``, "" if none did."""
        if node.name() == "torch::autograd::AccumulateGrad":
            name, _ = self._tensors.get(id(node.variable), (WHOLE_MODEL, None))
            return name
        place = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._started[place] if place >= 0 else ""

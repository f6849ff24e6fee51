"""End a micro-step halfway on purpose, to see whether everything that it leaves behind is undone."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchtune_adaptive.engine.memory.out_of_memory import is_out_of_memory


class Interruption:
    """Ends micro-steps as an out-of-memory error does.

    Args:
        model: the model that they run.
        after: end the forward pass after so many calls of its modules. None: end the backward pass, when it has come to
            the first module whose output needs a gradient.

    Attributes:
        calls: how many calls of modules there were in the forward pass.
        has_struck: whether a micro-step has come to the place where it is to end.
        goes_on: whether it has called modules after that, and has ended with an error of another kind.
    """

    def __init__(self, model: nn.Module, *, after: int | None = None) -> None:
        self._modules = [one for one in model.modules() if not isinstance(one, torch.jit.ScriptModule)]
        self._after = after
        self._is_under_way = False
        self._is_hooked = False
        self._is_called_again = False
        self.calls = 0
        self.has_struck = False
        self.goes_on = False

    def run(self, micro_step: Callable[[], Any]) -> None:
        """Run ``micro_step`` to the place where it is to end.

        Raises:
            torch.OutOfMemoryError: it has come to this place.
        """
        with ExitStack() as hooks:
            for module in self._modules:
                hooks.callback(module.register_forward_hook(self._after_call).remove)
            self._is_under_way = True
            hooks.callback(setattr, self, "_is_under_way", False)  # the graph of a loss that is left has its hook
            try:
                micro_step()
            except Exception as error:
                self.goes_on = self._is_called_again and not is_out_of_memory(error)
                raise

    def _after_call(self, _: nn.Module, __: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # computed once more, in a backward pass
            return
        if self.has_struck:
            self._is_called_again = True
            return
        self.calls += 1
        if self.calls == self._after:
            self._run_out_of_memory()
        if self._after is None and not self._is_hooked and torch.is_grad_enabled():
            needing = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
            for tensor in needing[:1]:
                tensor.register_hook(self._run_out_of_memory)
                self._is_hooked = True

    def _run_out_of_memory(self, *_: object) -> None:
        if self._is_under_way:
            self.has_struck = True
            raise torch.OutOfMemoryError("on purpose, to see whether a micro-step is undone")

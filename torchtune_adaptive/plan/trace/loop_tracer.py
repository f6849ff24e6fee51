"""Trace the steps of a loop that runs on fake tensors. It needs torch alone."""

import gc
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.plan.trace.events import MADE
from torchtune_adaptive.plan.trace.fake_step import FakeStep
from torchtune_adaptive.plan.trace.recorder import ON_HOST, Kind, StepTrace


class LoopTracer:
    """Traces optimizer steps of a loop: the memory they take and give back, by kind.

    Args:
        loop: its models and optimizers hold fake tensors of ``mode``. It reports its phases to ``enter_phase``, and
            batches that it is given to ``count``.
        frozen: those of its models that are not trained, such as a reference or a teacher.
        keeps_on_host: parameters, gradients and optimizer state are in host memory, where the optimizers step.
        counts_others: count tensors that live before a step and belong to neither models nor optimizers.
    """

    def __init__(
        self,
        loop: Loop,
        mode: FakeStep,
        *,
        frozen: Sequence[nn.Module] = (),
        keeps_on_host: bool = False,
        counts_others: bool = False,
    ) -> None:
        self.loop = loop
        self._mode = mode
        self._frozen = frozen
        self._keeps_on_host = keeps_on_host
        # Storages from before the first step; None: other tensors are not counted.
        self._others = WeakSet(mode.storages) if counts_others else None
        self._trace: StepTrace | None = None

    def trace(self, micro_batches: Sequence[Any]) -> StepTrace:
        """Trace a step. If it leaves other bytes behind than it found, trace it again: later steps find these."""
        with self._mode.faking():
            gc.collect()
            found_bytes = self._mode.live_bytes
            trace = self._traced(micro_batches)
            gc.collect()
            return trace if self._mode.live_bytes == found_bytes else self._traced(micro_batches)

    def enter_phase(self, name: str) -> None:
        """The loop enters phase ``name``, for example "forward"."""
        if self._trace is None:
            return
        if name in ("clip", "optimizer"):
            self._mark_gradients(self._trace)
        self._trace.enter_phase(name)

    def count(self, batch: Any) -> None:
        """The loop was given this batch, whose tensors no operation has made."""
        if self._trace is not None:
            self._trace.mark(batch, "activations")

    def _traced(self, micro_batches: Sequence[Any]) -> StepTrace:
        trace = StepTrace(like_cuda=self._mode.like_cuda, steps_on_host=self._keeps_on_host)
        model = self.loop.model
        trace.mark(list(model.buffers()), "parameters")
        attributes = (value for module in model.modules() for value in vars(module).values())
        trace.mark([value for value in attributes if isinstance(value, torch.Tensor)], "parameters")
        trace.mark(list(model.parameters()), self._kept("parameters"))
        for one in self._frozen:
            trace.mark(list(one.buffers()), "frozen models")
            trace.mark(list(one.parameters()), self._kept("frozen models"))
        trace.mark([list(one.state.values()) for one in self.loop.optimizers], self._kept("optimizer state"))
        self._mark_gradients(trace)
        if self._others is not None:
            trace.mark_others(one for one in self._mode.storages if one in self._others)
            trace.mark_others(self._mode.storages, name=MADE)
        self._trace = trace
        try:
            with trace:
                self.loop.step(micro_batches)
        finally:
            self._trace = None
        return trace

    def _mark_gradients(self, trace: StepTrace) -> None:
        gradients = [parameter.grad for parameter in self.loop.model.parameters()]
        trace.mark(gradients, self._kept("gradients"), name=MADE)

    def _kept(self, kind: Kind) -> Kind:
        return ON_HOST if self._keeps_on_host else kind

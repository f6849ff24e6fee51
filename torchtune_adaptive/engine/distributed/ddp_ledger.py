"""The ledger of a model in ``DistributedDataParallel``, whose gradients it averages itself.

No micro-step uses the reducer of ``DistributedDataParallel``, which cannot be reset after an error. In the last
micro-step of an optimizer step, gradients are averaged in buckets: each as soon as the backward pass has computed it,
and in place, so that nothing is allocated. A rank that fails replays the rest of the buckets with zeros.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.functional_collectives import CannotRecordError, IssuedCounts
from torchtune_adaptive.engine.distributed.ledger import AnyCollective, Collective, Ledger
from torchtune_adaptive.errors import InputError

BUCKET_BYTES = 25 * 2**20  # the default of `DistributedDataParallel`


class DdpLedger(Ledger):
    """Averages the gradients of ``ddp`` as its own backward pass would, and records the collectives."""

    def __init__(self, ddp: DistributedDataParallel, device: torch.device) -> None:
        """Attach to ``ddp``.

        Raises:
            CannotRecordError: ``ddp`` is used in a way that cannot be recorded.
            InputError: it is within a context that lets ranks train apart.
        """
        super().__init__(device, reduces_once=True)
        _check_ranks_stay_together(ddp)
        if what := _not_supported(ddp):
            raise CannotRecordError(f"DistributedDataParallel with {what} is not supported")
        self._ddp = ddp
        self._group: Any = ddp.process_group
        self.of_any_code = IssuedCounts([self._group])
        self._parameters: list[nn.Parameter] = [one for one in ddp._module_parameters if one.requires_grad]
        self._buckets = buckets_of(self._parameters[::-1], BUCKET_BYTES)  # the last ones have their gradients first
        self._bucket_of = {parameter: number for number, bucket in enumerate(self._buckets) for parameter in bucket}
        # How often a parameter's gradient grows in a micro-step; infinite if that may differ.
        self._expected: dict[nn.Parameter, float] = {}
        self._grown: Counter[nn.Parameter] = Counter()
        self._missing: list[float] = []  # per bucket, how often its gradients have still to grow
        # How many backward passes a micro-step has; infinite if that may differ. 0: not known yet.
        self._expected_passes: float = 0
        self._num_passes = 0  # that have ended
        self._works: list[dist.Work] = []
        self._is_running = False
        # Where `DistributedDataParallel` has its own: after all hooks of a parameter, also those that come later.
        self._nodes = [(one, _node_that_accumulates(one)) for one in self._parameters]
        self._hooks = [node.register_hook(partial(self._has_grown, one)) for one, node in self._nodes]

    def detach(self) -> None:
        """Remove the hooks on the parameters."""
        for hook in self._hooks:
            hook.remove()

    def start_step(self) -> None:
        """Broadcast the buffers, as ``DistributedDataParallel`` does in the first forward pass of a step.

        Raises:
            InputError: ``ddp`` is within a context that lets ranks train apart.
        """
        _check_ranks_stay_together(self._ddp)
        if self._ddp.will_sync_module_buffers():
            self._ddp._sync_buffers()
        self._ddp.require_forward_param_sync = True  # as after a step that it has reduced itself

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of a micro-step; at the end of the last one, gradients are averaged."""
        self._grown.clear()
        self._num_passes = 0
        self.unused.clear()
        self._missing = [sum(self._expected.get(one, math.inf) for one in bucket) for bucket in self._buckets]
        kept = self._ddp.require_forward_param_sync
        self._ddp.require_forward_param_sync = False  # `start_step` has broadcast the buffers
        try:
            with without_reducer(self._ddp), self._passes_followed():
                self._is_running = True
                yield
        finally:
            self._is_running = False
            self._ddp.require_forward_param_sync = kept
        if self.is_last:
            self._issue_rest()
            self._wait()
        self._learn()

    def drop_unused(self, consensus: Consensus) -> None:
        """Set gradients to None that no rank has computed, as ``find_unused_parameters`` does. A collective."""
        is_used = consensus.max_of_each(*(one not in self.unused for one in self._parameters))
        for parameter, is_used_somewhere in zip(self._parameters, is_used, strict=True):
            if not is_used_somewhere:
                parameter.grad = None

    def replay_rest(self, whole: Sequence[AnyCollective] | None = None) -> None:
        """Issue the rest of the buckets with zeros, and wait for all of them."""
        super().replay_rest(whole)
        self._wait()

    def _replay(self, collective: Collective) -> None:
        zeros = torch.zeros(collective.numel, dtype=collective.dtype, device=self._device)
        bucket = self._buckets[collective.place]
        self._all_reduce(list(zeros.split([one.numel() for one in bucket])), collective)

    def _has_grown(self, parameter: nn.Parameter, *_: object) -> None:
        """Note that the backward pass has added to the gradient of ``parameter``, and issue buckets that are complete.

        It does nothing outside of micro-steps: a backward pass between steps, as of a penalty, is not averaged.

        Raises:
            RuntimeError: the gradient was already being averaged.
        """
        if not self._is_running:
            return
        self._grown[parameter] += 1
        number = self._bucket_of[parameter]
        self._missing[number] -= 1
        if not self.is_last:
            return
        if number < len(self._issued):
            raise RuntimeError(
                "A gradient grew after it had been averaged: the micro-step uses a parameter more often than the ones"
                " before it. Call `RecoverableStep.disable()` to train this model without recovery."
            )
        while len(self._issued) < len(self._buckets) and not self._missing[len(self._issued)]:
            self._issue()

    @contextmanager
    def _passes_followed(self) -> Iterator[None]:
        """Context: the end of each backward pass finishes the averages, as the micro-step may then change gradients.

        After the last pass this includes buckets with parameters that some backward passes do not use. A pass that
        another one runs, as reentrant checkpoints do, is a part of that.
        """
        autograd: Any = torch.autograd
        run: Callable[..., Any] = autograd._engine_run_backward
        depth = 0

        def run_and_finish(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            num_grown, depth = self._grown.total(), depth + 1
            try:
                found = run(*args, **kwargs)
            finally:
                depth -= 1
            if not depth and self._grown.total() > num_grown:
                self._num_passes += 1
                if self.is_last and self._num_passes == self._expected_passes:
                    self._issue_rest()
                self._wait()
            return found

        autograd._engine_run_backward = run_and_finish
        try:
            yield
        finally:
            autograd._engine_run_backward = run

    def _issue_rest(self) -> None:
        while len(self._issued) < len(self._buckets):
            self._issue()

    def _issue(self) -> None:
        """Average the gradients of the next bucket."""
        number = len(self._issued)
        bucket = self._buckets[number]
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self.unused.add(parameter)
        gradients = [one.grad for one in bucket if one.grad is not None]
        for gradient in gradients:
            gradient.mul_(1 / self._group.size())  # before the sum, as DistributedDataParallel does
        numel = sum(one.numel() for one in bucket)
        self._all_reduce(gradients, Collective("all-reduce", number, numel, bucket[0].dtype, self._group))

    def _all_reduce(self, tensors: list[torch.Tensor], collective: Collective) -> None:
        options = dist.AllreduceCoalescedOptions()
        options.asyncOp = True
        self.issuing()
        self._works.append(self._group.allreduce_coalesced(tensors, options))
        self.record(collective)

    def _wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def _learn(self) -> None:
        """Note how often each gradient has grown in a micro-step that has succeeded."""
        for parameter in self._parameters:
            grown = self._grown[parameter] or math.inf  # one without a gradient may have one later
            self._expected[parameter] = grown if self._expected.get(parameter, grown) == grown else math.inf
        if self._num_passes:
            self._expected_passes = self._num_passes if self._expected_passes in (0, self._num_passes) else math.inf


def _node_that_accumulates(parameter: nn.Parameter) -> Any:
    """The node of autograd that adds to the gradient of ``parameter``. Whoever has a hook on it must keep it."""
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(parameter).node


def _check_ranks_stay_together(ddp: DistributedDataParallel) -> None:
    """Check that ``ddp`` is in no context in which its ranks train apart.

    Raises:
        InputError: it is, or was in ``Join``, which leaves its setting behind.
    """
    if ddp._join_config.enable:  # a rank that has failed could not answer
        raise InputError(
            "A `DistributedDataParallel` that is or was in `Join`, as of accelerate's `join_uneven_inputs`,"
            " communicates in its forward passes: give all ranks equally many steps instead."
        )
    if not ddp.require_backward_grad_sync:
        raise InputError(
            "A step within `no_sync`, as of accelerate's `LocalSGD` or `accumulate`, would average the gradients of all"
            " ranks all the same: call it outside, with all samples of an optimizer step."
        )


@contextmanager
def without_reducer(ddp: DistributedDataParallel) -> Iterator[None]:
    """Context: the reducer of ``ddp`` takes no part, and ``torch.compile`` does not split the model at its buckets.

    After a forward pass with gradients that has no backward pass of its parameters, as of a validation without
    ``no_grad``, the reducer would average the gradients of the next backward pass, also within ``no_sync``. After this
    context it would miss those of parameters that the context has used, and the next backward pass does not. And the
    parts of a model would be compiled while operations are recorded, and fail.
    """
    reset: Callable[[], None] = ddp.reducer._reset_state  # of both, and of buckets that it would build anew
    reset()
    dynamo = sys.modules.get("torch._dynamo")  # imported by whoever compiles
    try:
        with ddp.no_sync(), dynamo.config.patch(optimize_ddp=False) if dynamo else nullcontext():
            yield
    finally:
        reset()


def _not_supported(ddp: DistributedDataParallel) -> str:
    """What ``ddp`` is used with that recovery does not support, or ""."""
    parameters = ddp._module_parameters
    reasons = {
        "another DistributedDataParallel or FSDP2 in it": any(
            isinstance(one, DistributedDataParallel | FSDPModule) for one in ddp.module.modules()
        ),
        "its own mixed precision": ddp.mixed_precision is not None,
        "a static graph": ddp.static_graph,
        "a communication hook": bool(ddp._comm_hooks),
        "a hook for buffers": hasattr(ddp, "buffer_hook"),
        "an optimizer in its backward pass": any(hasattr(one, "_in_backward_optimizers") for one in parameters),
        "compiled autograd": ddp._use_python_reducer,
        "delayed all-reduces": bool(ddp._delay_all_reduce_params),
        "parameters on a device mesh": any(isinstance(one, DTensor) for one in parameters),
        "complex parameters": any(one.is_complex() for one in parameters),
        "sparse gradients": any(
            isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse for one in ddp.module.modules()
        ),
    }
    return next((what for what, is_used in reasons.items() if is_used), "")


def buckets_of(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """``parameters`` in buckets of at most ``bucket_bytes``, or of one parameter; each of one type."""
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        if not buckets or buckets[-1][0].dtype != parameter.dtype or filled + parameter.nbytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += parameter.nbytes
    return buckets

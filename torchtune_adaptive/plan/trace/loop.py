"""Trace the train step of any PyTorch loop, in this process. It needs torch alone.

Nothing is computed: the model is built on the meta device, and its step runs on fake tensors.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.loop import Loop, is_compiled
from torchtune_adaptive.engine.memory.devices import optimizers_of
from torchtune_adaptive.engine.memory.out_of_memory import only_new_garbage
from torchtune_adaptive.engine.memory.phases import phases_by_hooks
from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.engine.search.strategies import SMALL_BATCH_SIZES
from torchtune_adaptive.errors import InputError, quote, require_integer
from torchtune_adaptive.plan.trace.as_cuda import DevicesMapped, as_cuda
from torchtune_adaptive.plan.trace.events import BEFORE, Event, Events, extended
from torchtune_adaptive.plan.trace.fake_step import FakeStep, treated_as_real
from torchtune_adaptive.plan.trace.fake_tensors import make_fake
from torchtune_adaptive.plan.trace.loop_tracer import LoopTracer
from torchtune_adaptive.plan.trace.restored import fake_process_group, settings_restored
from torchtune_adaptive.plan.trace.step_events import StepEvents, TracedStep
from torchtune_adaptive.plan.trace.untraceable import why_untraceable

# The third tells what grows with the square of their number. A dimension of size 1 runs other operations.
TRACED_SIZES = (*SMALL_BATCH_SIZES, SMALL_BATCH_SIZES[-1] + 1, 1)
_SHOWN_AFTER_S = 2.0

BuildModel = Callable[[], nn.Module]
BuildOptimizer = Callable[[Any], torch.optim.Optimizer]
TrainStep = Callable[[Any, Any, Any], object]
MakeBatch = Callable[[int], Any]


@dataclass(frozen=True, kw_only=True)
class TracedLoop(TracedStep):
    """The step of a loop, whose samples need not be rows of tokens: it has one length, 0.

    Attributes:
        model_name: the model's type.
        is_compiled: the model, or a part of it, would be compiled. It was not for the trace.
    """

    model_name: str
    is_compiled: bool

    @property
    def step(self) -> StepEvents:
        """A steady-state step of any number of samples."""
        return self.lengths[0]

    def events(self, num_samples: int) -> Events:
        """Those of a step that was traced."""
        return self.step.traced[num_samples][0]


def trace_loop(
    build_model: BuildModel,
    build_optimizer: BuildOptimizer,
    train_step: TrainStep,
    make_batch: MakeBatch,
    *,
    ranks: int = 1,
    like_cuda: bool = True,
    sizes: Sequence[int] = TRACED_SIZES,
    values_are_fixed: bool = False,
    keeps_on_host: Callable[[], bool] = lambda: False,
) -> TracedLoop:
    """Trace a loop's step at a few batch sizes, on tensors without memory.

    A trace that takes more than two seconds shows a progress bar on standard error.

    Everything that a trace changes in torch is restored, also after an error: random generators, the default device and
    type, patches, the process group.

    Args:
        build_model, build_optimizer, train_step, make_batch: see ``plan_max_batch_size``.
        ranks: ranks that train the model together. With more than one, a process group of them exists in all
            functions, of which this process is rank 0.
        like_cuda: trace what a GPU would run and allocate. "cuda" can be named as a device without a GPU.
        sizes: numbers of samples to trace. Steps of more follow from the two or three largest of them.
        values_are_fixed: batches differ in their number of samples alone, so that sizes may depend on their values.
        keeps_on_host: whether parameters, gradients and optimizer state are in host memory, where the optimizer steps.
            It is called once the model is built.

    Raises:
        InputError: the loop cannot be traced; the message says why.
    """
    require_integer("ranks", ranks, minimum=1)
    with ExitStack() as stack:
        stack.enter_context(settings_restored())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if ranks > 1:
            stack.enter_context(fake_process_group(ranks))
        if like_cuda:
            stack.enter_context(as_cuda(ranks))
        model = _built(build_model, like_cuda=like_cuda)
        batches = _batches(make_batch, sizes, like_cuda=like_cuda)
        stack.enter_context(treated_as_real())  # transformers is loaded by now, if the model comes from it
        stack.enter_context(only_new_garbage())
        mode = FakeStep(like_cuda=like_cuda, values_are_fixed=values_are_fixed)
        loop = _FakeLoop(model, build_optimizer, train_step, mode, keeps_on_host=keeps_on_host())
        with Bar(total=1 + len(sizes), desc="tracing", unit=" steps", delay=_SHOWN_AFTER_S) as bar:
            return loop.traced(batches, after_step=bar.update)


class _FakeLoop:
    """A user's model, optimizer and step, on fake tensors."""

    def __init__(
        self,
        model: nn.Module,
        build_optimizer: BuildOptimizer,
        train_step: TrainStep,
        mode: FakeStep,
        *,
        keeps_on_host: bool,
    ) -> None:
        self._mode = mode
        self._model = model
        self._train_step = train_step
        with self._mode.faking():
            make_fake(model)
            self._optimizer = _called("build_optimizer", build_optimizer, model, mode=self._mode)
        _require_optimizer_of(model, self._optimizer)
        loop = Loop(
            model=model,
            optimizers=optimizers_of(self._optimizer),
            device=torch.device("cpu"),
            micro_step=self._run,
            consensus=Consensus([0]),
        )
        self._tracer = LoopTracer(loop, self._mode, keeps_on_host=keeps_on_host, counts_others=True)

    def traced(self, batches: Mapping[int, Any], *, after_step: Callable[[], object]) -> TracedLoop:
        """Trace steps with ``batches``, by their numbers of samples."""
        traced: dict[int, Events] = {}
        small = next(iter(batches))
        with self._mode.faking():
            self._run(batches[small])  # creates the optimizer's state and lets FSDP2 set itself up
        after_step()
        for size, batch in batches.items():
            try:
                traced[size] = self._tracer.trace([batch]).events()
            except InputError:
                if size > 1:  # batch normalisation needs several
                    raise
            after_step()
        if _unlike(traced, small) is not None:
            traced[small] = self._tracer.trace([batches[small]]).events()  # the warm-up may have left something behind
            if (large := _unlike(traced, small)) is not None:
                raise _unequal(traced, small, large)
        return TracedLoop(
            # A loop's first step makes the state.
            (StepEvents(0, {size: (events,) for size, events in sorted(traced.items())}, state_exists=False),),
            model_name=type(getattr(self._model, "_orig_mod", self._model)).__name__.removeprefix("FSDP"),
            num_parameters=sum(one.numel() for one in self._model.parameters()),
            is_compiled=is_compiled(self._model),
        )

    def _run(self, real_batch: Any) -> None:
        """Run one step."""
        phases: list[str] = []

        def enter(phase: str) -> None:
            phases.append(phase)
            self._tracer.enter_phase(phase)

        batch = with_tensors(real_batch, self._mode.fake)
        self._tracer.count(_tensors_of(batch))
        enter("forward")
        with phases_by_hooks(self._model, self._tracer.loop.optimizers, enter):
            _called("train_step", self._train_step, self._model, self._optimizer, batch, mode=self._mode)
        if "optimizer" not in phases:
            raise InputError("`train_step` did not step the optimizer that it was given.")


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a batch with changed tensors. They may be in lists, tuples, mappings and attributes of objects."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: with_tensors(one, change) for key, one in value.items()})
        return copied
    if isinstance(value, list | tuple):
        changed = [with_tensors(one, change) for one in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if isinstance(value, type) or not hasattr(value, "__dict__") or callable(value):
        return value
    copied = copy.copy(value)  # for example a `BatchEncoding`, which keeps a dict
    for name, one in vars(value).items():
        object.__setattr__(copied, name, with_tensors(one, change))
    return copied


def _tensors_of(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    with_tensors(batch, lambda tensor: found.append(tensor) or tensor)
    return found


def _called(name: str, function: Callable[..., Any], *args: Any, mode: FakeStep | None = None) -> Any:
    """Call a function of the user.

    Raises:
        InputError: it failed, because it needs values, or for a reason of its own.
    """
    try:
        return function(*args)
    except InputError:
        raise
    except Exception as error:
        why = why_untraceable(error, has_read_values=mode is not None and mode.has_read_values)
        raise InputError(f"`{name}` cannot be planned, which runs it on tensors without values: {why}.") from error


def _built(build_model: BuildModel, *, like_cuda: bool) -> nn.Module:
    with ExitStack() as stack:
        if like_cuda:
            stack.enter_context(DevicesMapped("meta"))
        stack.enter_context(torch.device("meta"))
        model = _called("build_model", build_model)
    if not isinstance(model, nn.Module):
        raise InputError(f"`build_model` must return a module, but returned {quote(model)} instead.")
    parameters = dict(model.named_parameters())
    if not parameters:
        raise InputError("`build_model` returned a model without parameters.")
    of_cudnn = (type(one).__name__ for one in model.modules() if isinstance(one, nn.RNNBase))
    if like_cuda and (kind := next(of_cudnn, "")):
        raise InputError(f"`torch.nn.{kind}` is not planned: cuDNN computes it on a GPU, in memory that is not known.")
    for name, parameter in parameters.items():
        if parameter.device.type != "meta":
            raise InputError(
                f"`build_model` is called on the meta device and must leave the model there, but `{name}` is on"
                f" '{parameter.device}'."
            )
    return model


def _batches(make_batch: MakeBatch, sizes: Sequence[int], *, like_cuda: bool) -> dict[int, Any]:
    """Real batches, by their numbers of samples: a few rows take no memory worth mentioning, and models read them."""
    with ExitStack() as stack:
        if like_cuda:
            stack.enter_context(DevicesMapped("cpu"))
        batches = {size: _called("make_batch", make_batch, size) for size in sizes}
    _require_linear({size: [tuple(one.shape) for one in _tensors_of(batch)] for size, batch in batches.items()})
    return batches


def _require_linear(shapes: dict[int, list[tuple[int, ...]]]) -> None:
    """Refuse batches whose tensors do not have so many elements more with each sample.

    Raises:
        InputError: the shapes are not those of batches with so many samples.
    """
    sizes = sorted(shapes)
    elements = [[math.prod(shape) for shape in shapes[size]] for size in sizes]
    of_a_sample = {
        tuple((more - few) / (large - small) for few, more in zip(one, other, strict=False))
        for (small, one), (large, other) in pairwise(zip(sizes, elements, strict=True))
    }
    is_linear = len({*map(len, elements)}) == 1 and len(of_a_sample) <= 1
    if not is_linear or any(max(one, default=0) <= 0 for one in of_a_sample):
        told = "; ".join(f"{', '.join(map(str, shapes[size])) or 'none'} for n={size}" for size in sizes)
        raise InputError(f"`make_batch(n)` must return n samples of one length, but its tensors have shapes {told}.")


def _require_optimizer_of(model: nn.Module, optimizer: Any) -> None:
    """Refuse what is not an optimizer of the model's parameters, or one whose first steps say little of later ones.

    Raises:
        InputError: it is one of these.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"`build_optimizer` must return an optimizer, but returned {quote(optimizer)} instead.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("`torch.optim.LBFGS` is not planned: its state grows from step to step.")
    known = {id(parameter) for parameter in model.parameters()}
    strange = sum(id(one) not in known for group in optimizer.param_groups for one in group["params"])
    if strange:
        raise InputError(
            f"`build_optimizer` returned an optimizer with {strange} parameters that its model does not have."
        )


def _unlike(traced: Mapping[int, Events], small: int) -> int | None:
    """A size above ``small`` whose step differs from that of ``small`` in more than bytes; None if there is none."""
    few = traced[small]
    larger = ((size, more) for size, more in traced.items() if size > small)
    return next((size for size, more in larger if len(few) != len(more) or extended(few, more, 1) != more), None)


def _unequal(traced: Mapping[int, Events], small: int, large: int) -> InputError:
    """The error for steps that ran different operations."""
    ended = Event("the end", "the end", "", 0)
    one, other = ([event for event in traced[size] if event.phase != BEFORE] for size in (small, large))
    pairs = list(zip([*one, ended], [*other, ended], strict=False))
    place = next((place for place, (first, second) in enumerate(pairs) if first[:3] != second[:3]), 0)
    first, second = pairs[place]
    phase = first.phase if first is not ended else second.phase
    return InputError(
        f"`train_step` must run the same operations at all batch sizes, but in {phase} is {first.operation} with"
        f" {small} samples and {second.operation} with {large}."
    )

"""A search restores all that an optimizer holds, or refuses it by name, and runs no hooks of its steps."""

import io
import itertools
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchtune_adaptive import InputError, SearchResult, find_max_batch_size
from torchtune_adaptive.engine.distributed.snapshot import restore_on_exit
from torchtune_adaptive.engine.optimizers import SavedOptimizers, optimizers_within

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch imports its deprecated optimizers for TorchScript as well
    from torch.distributed.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.usefixtures("group_of_one")  # which ``ZeroRedundancyOptimizer`` needs
Parameters = list[nn.Parameter]


class Wrapper(torch.optim.Optimizer):
    """An optimizer that leaves steps to another one."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.inner = torch.optim.AdamW(parameters, lr=0.01)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@dataclass(slots=True)
class Projector:
    basis: torch.Tensor
    uses: int = 0


class Collector(torch.optim.SGD):
    """Momentum, and everything else that an optimizer may keep, all of which changes in each step."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self.average = nn.Linear(2, 2)
        self.lists = {"a": [[torch.ones(2)], {1}], "b": (bytearray(b"x"), deque([1], maxlen=3))}
        self.projector = Projector(torch.eye(2))
        self.array, self.scale = np.ones((2, 2)), np.float32(1)
        self.generators = [torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)]
        self.by_name = {"a name": torch.zeros(3)}
        self.scheduler = torch.optim.lr_scheduler.StepLR(self, step_size=1, gamma=0.5)
        self.num_steps = 0
        self.slow = [parameter.detach().clone() for parameter in parameters]
        self.copies = [nn.Parameter(parameter.detach().double()) for parameter in parameters]
        self.inner = {"all": [torch.optim.AdamW(self.copies, lr=0.01)]}  # trains the copies

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self._change_values()
        parameters = self.param_groups[0]["params"]
        for copy, slow, parameter in zip(self.copies, self.slow, parameters, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.double()
            slow.lerp_(parameter.detach(), 0.5)  # as in Lookahead
            self.state[parameter]["old"] = parameter.data  # as in SAM
            parameter.data = parameter.data.clone()
        self.inner["all"][0].step()
        for copy, parameter in zip(self.copies, parameters, strict=True):
            parameter.data.add_(copy.detach(), alpha=0.1)

    def _change_values(self) -> None:
        tensors, numbers = self.lists["a"]
        values, last = self.lists["b"]
        tensors[0].mul_(2)
        tensors.append(torch.ones(1))
        numbers.add(len(numbers) + 1)
        values.extend(b"more")
        last.extend([2, 3, 4])
        self.projector.basis.add_(1)
        self.projector.uses += 1
        self.num_steps += 1
        self.last_step = self.num_steps
        self.array *= 2
        self.scale *= 2
        self.by_name["a name"] = self.by_name["a name"] + 1
        self.by_name["another"] = torch.ones(1)
        self.average.weight.data.mul_(0.5)
        self.generators[1].random()
        self.generators[2].random()
        torch.rand(1, generator=self.generators[0])
        self.param_groups[0]["seen"] = [*self.param_groups[0].get("seen", []), 1]


def lbfgs(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


def zero(parameters: Parameters) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=True)


OPTIMIZERS = [lbfgs, zero, Collector]


class Trainee:
    """A small model and its optimizer. Always starts from the same state."""

    def __init__(self, make_optimizer: Callable[[Parameters], torch.optim.Optimizer], *, warm_steps: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.optimizer = make_optimizer(list(self.model.parameters()))
        self.batch = torch.randn(5, 4)
        self.remove_hooks: Callable[[], object] = lambda: None
        for _ in range(warm_steps):
            self.step()

    def step(self, batch: torch.Tensor | None = None) -> float:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = (self.model(self.batch if batch is None else batch) - 1).square().mean()
            loss.backward()
            return loss.detach()

        loss = closure()
        step: Any = self.optimizer.step
        step(closure) if isinstance(self.optimizer, torch.optim.LBFGS) else step()
        self.optimizer.zero_grad()
        return loss.item()

    def search(self, step: Callable[[torch.Tensor], object] | None = None) -> SearchResult:
        return find_max_batch_size(
            step or self.step,
            lambda rows: torch.ones(rows, 4),
            model=self.model,
            optimizer=self.optimizer,
            memory_limit="64KiB",
            max_batch_size=8,
        )


def picture(value: Any, seen: dict[int, Any]) -> Any:
    """Everything that ``value`` holds, except what is in ``seen``, and the identity of each object."""
    if id(value) in seen:
        return id(value)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        return id(value), value.data_ptr(), value.tolist(), picture(value.grad, seen) if value.is_leaf else None
    if isinstance(value, dict):
        return id(value), [(picture(key, seen), picture(one, seen)) for key, one in value.items()]
    if isinstance(value, list | tuple | deque | set):
        return id(value), [picture(one, seen) for one in value]
    if isinstance(value, nn.Module):
        return picture(list(value.parameters()), seen)[1]
    if isinstance(value, Projector):
        return id(value), picture(value.basis, seen), value.uses
    if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        return id(value), picture(vars(value), seen)[1]
    return repr(value)


def picture_of(trainee: Trainee) -> Any:
    """Everything that the optimizer holds, without the weights of the model."""
    return picture(trainee.optimizer, {id(one): one for one in trainee.model.parameters()})


@pytest.fixture(params=OPTIMIZERS, ids=lambda one: one.__name__)
def make_optimizer(request: pytest.FixtureRequest) -> Callable[[Parameters], torch.optim.Optimizer]:
    return request.param


# ---- what is restored


@pytest.mark.slow
@pytest.mark.parametrize("warm_steps", [0, 2], ids=["fresh", "warm"])
def test_all_that_an_optimizer_holds_is_restored_each_time(make_optimizer: Any, warm_steps: int) -> None:
    trainee = Trainee(make_optimizer, warm_steps=warm_steps)
    before = picture_of(trainee)
    with restore_on_exit(trainee.model, [trainee.optimizer]) as restore_optimizers:
        for _ in range(3):
            trainee.step()
            trainee.step()
            assert picture_of(trainee) != before
            restore_optimizers()
            assert picture_of(trainee) == before
        trainee.step()
    assert picture_of(trainee) == before


@pytest.mark.parametrize("make_optimizer", [lbfgs, Collector])
def test_training_after_a_search_is_as_without_one(make_optimizer: Any) -> None:
    untouched, searched = (Trainee(make_optimizer, warm_steps=1) for _ in range(2))
    assert searched.search().exact_batch_size == 8
    assert [searched.step() for _ in range(4)] == [untouched.step() for _ in range(4)]


def test_each_tensor_is_copied_once_and_those_of_the_model_not_at_all() -> None:
    trainee = Trainee(Wrapper, warm_steps=1)
    optimizer: Any = trainee.optimizer
    optimizer.slow = torch.ones(1)
    optimizer.twice = [optimizer.slow, trainee.model[0].weight]
    tensors = SavedOptimizers([optimizer, optimizer.inner], trainee.model).tensors
    states = [one for state in optimizer.inner.state.values() for one in state.values()]
    assert sorted(map(id, tensors)) == sorted(map(id, [optimizer.slow, *states]))


# ---- what is refused


def with_generator(optimizer: Any) -> None:
    optimizer.draws = (random.random() for _ in range(9))


def with_iterator_in_state(optimizer: Any) -> None:
    optimizer.state["rates"] = {"next": itertools.count()}


def with_a_log_inside(optimizer: Any) -> None:
    optimizer.inner.log = [io.StringIO()]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_generator, "`draws` of `Wrapper` is a generator"),
        (with_iterator_in_state, "`state['rates']['next']` of `Wrapper` is a count"),
        (with_a_log_inside, "`inner.log[...]` of `Wrapper` is a StringIO"),
    ],
)
def test_what_cannot_be_restored_is_refused_by_name_before_the_first_step(
    change: Callable[[Any], None], named: str
) -> None:
    trainee, steps = Trainee(Wrapper), list[Any]()
    change(trainee.optimizer)
    trainee.optimizer.register_step_post_hook(hook := lambda *_: None)
    with pytest.raises(InputError) as raised:
        trainee.search(steps.append)
    assert named in str(raised.value)
    assert steps == []
    assert list(trainee.optimizer._optimizer_step_post_hooks.values()) == [hook]


# ---- hooks of steps


@pytest.fixture
def calls(trainee: Trainee) -> Iterator[list[str]]:
    """The hooks that have run: before and after steps of an optimizer, of one that it holds, and of all optimizers."""
    calls, optimizer = list[str](), trainee.optimizer
    registers: dict[str, Callable[..., Any]] = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "inner": optimizers_within([optimizer])[1].register_step_post_hook,
        "global pre": register_optimizer_step_pre_hook,
        "global post": register_optimizer_step_post_hook,
    }
    handles = [register(lambda *_, name=name: calls.append(name)) for name, register in registers.items()]
    trainee.remove_hooks = lambda: [handle.remove() for handle in handles]
    yield calls
    trainee.remove_hooks()


@pytest.fixture
def trainee() -> Trainee:
    return Trainee(Wrapper)


def test_a_search_runs_no_hooks_of_steps_but_knows_the_phase_and_later_steps_run_them(
    trainee: Trainee, calls: list[str]
) -> None:
    trainee.step()
    in_training = calls.copy()
    assert len(in_training) == 7  # the global ones also of the inner optimizer
    calls.clear()
    found = trainee.search()
    assert calls == []
    assert all(probe.phase_peak_bytes["optimizer"] > 0 for probe in found.probes)
    trainee.step()
    assert calls == in_training


def test_a_hook_that_is_removed_in_a_search_stays_removed(trainee: Trainee, calls: list[str]) -> None:
    trainee.search(lambda batch: (trainee.remove_hooks(), trainee.step(batch)))
    trainee.step()
    assert calls == []

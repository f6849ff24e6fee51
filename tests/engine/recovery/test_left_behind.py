"""A step that fails halfway, a dry run and a search leave nothing in the model that a plain loop would not have."""

import collections
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.faults import same_bits, under
from torchtune_adaptive import RecoverableStep, find_max_batch_size
from torchtune_adaptive.testing import Fault, wrap_micro_steps

ROWS, WIDTH, STEPS = 8, 6, 3
LARGE, SMALL = 4, 2
Rows = torch.Tensor  # [rows, steps in time, WIDTH]


class Growing(nn.Module):
    """Positions in a buffer that grows, whose length is a plain attribute."""

    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.register_buffer("positions", torch.zeros(0, WIDTH), persistent=False)

    def forward(self, rows: Rows) -> Rows:
        if rows.shape[1] > self.length:
            self.length = rows.shape[1]
            positions = torch.linspace(0, 1, self.length).sqrt()[:, None].repeat(1, WIDTH)
            self.register_buffer("positions", positions, persistent=False)
        return rows + self.positions[: rows.shape[1]]


class Drawn(nn.Module):
    """Random features that the first forward pass draws into an attribute, and scales into a tuple."""

    def forward(self, rows: Rows) -> Rows:
        if not hasattr(self, "scales"):
            self.features, self.scales = torch.randn(WIDTH, WIDTH), ([torch.randn(WIDTH)], "a name")
        return rows @ self.features * self.scales[0][0]


class Filled(nn.Module):
    """Random features in a buffer that was empty, and a flag which says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_filled, self.number = False, 0
        self.register_buffer("features", None)

    def forward(self, rows: Rows) -> Rows:
        if not self.is_filled:
            self.features, self.is_filled = torch.randn(WIDTH, WIDTH), True
        self.number += 1
        return rows @ self.features + self.number / 100


class Recurrent(nn.Module):
    """A state from batch to batch, in a plain attribute that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(WIDTH)

    def forward(self, rows: Rows) -> Rows:
        self.state.mul_(0.5).add_(rows.detach().sum((0, 1)))
        return rows + self.state.clone()


class Late(nn.Module):
    """A state from batch to batch, in an attribute that is None until the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor | None = None

    def forward(self, rows: Rows) -> Rows:
        before = torch.zeros(WIDTH) if self.state is None else self.state
        self.state = before / 2 + rows.detach().sum((0, 1))
        return rows + before


class Added(nn.Module):
    """States from batch to batch: one is a number at first, an attribute and a buffer are added by the first pass."""

    third: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = 0.0

    def forward(self, rows: Rows) -> Rows:
        if not hasattr(self, "second"):
            self.second = torch.zeros(WIDTH)
            self.register_buffer("third", torch.zeros(WIDTH))
        before, new = self.first + self.second + self.third, rows.detach().sum((0, 1))
        self.first, self.second = self.first / 2 + new, self.second / 3 + new
        self.third.add_(new)
        return rows + before / 10


class Queue(nn.Module):
    """Features of earlier batches and their sums, in plain attributes of more than 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.earlier, self.sums = torch.zeros(2**18, 2), torch.zeros(2**19)

    def forward(self, rows: Rows) -> Rows:
        new = rows.detach().sum((0, 1))[None, :2]
        before = self.earlier[0].sum() + self.sums[0]
        self.earlier = torch.cat([new, self.earlier[:-1]])
        self.sums += new.sum()
        return rows + before / 10


class Paired(nn.Module):
    """A state in a tuple, as that of an LSTM, and another one in a list, which is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.sums = (torch.zeros(WIDTH), 0), [torch.zeros(WIDTH)]

    def forward(self, rows: Rows) -> Rows:
        before, number = self.state
        self.state = before / 2 + rows.detach().sum((0, 1)), number + 1
        self.sums[0].add_(before)
        return rows + before + self.sums[0].clone() / self.state[1]


class Centred(nn.Module):
    """A loss whose centre follows the batches, as DINO's."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return values
        self.calls += 1
        total = (values - self.centre / self.calls).square().sum()
        self.centre = self.centre * 0.99 + values.detach().mean((0, 1)) * 0.01
        return total


class LossOfItsOwn:
    """Has a module that is none of the model's; it runs without gradients, too, and in another mode."""

    def __init__(self) -> None:
        self.centred = Centred()

    def __call__(self, model: Any, rows: Rows) -> torch.Tensor:
        self.centred.eval()
        with torch.no_grad():
            self.centred(rows)
        self.centred.train()
        return self.centred(model(rows))


class Observer(nn.Module):
    """The largest value so far, in a buffer that the first forward pass gives its shape."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, rows: Rows) -> Rows:
        largest = rows.detach().abs().amax((0, 1))
        self.largest.resize_(largest.shape).copy_(largest)
        return rows


class Balanced(nn.Module):
    """Auxiliary losses in a list, which the loop adds up and clears; counts in a dict; a history that starts late."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.losses = list[torch.Tensor]()
        self.counts = {"calls": 0}

    def forward(self, rows: Rows) -> Rows:
        if not hasattr(self, "history"):
            self.history = collections.deque[int](maxlen=2)
        self.counts["calls"] += 1
        self.history.append(self.counts["calls"])
        self.losses.append(self.gate(rows).square().sum())
        self.losses.append(self.gate(rows + sum(self.history) / 10).square().sum())
        return rows


@dataclass
class Calls:
    """How often a layer was called."""

    forward: int = 0


class Routed(Balanced):
    """The same losses in lists within a dict, and the number of calls in objects and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind = collections.defaultdict[str, list[torch.Tensor]](list)
        self.namespace, self.last_two = SimpleNamespace(calls=[Calls()]), (0, 0)

    def forward(self, rows: Rows) -> Rows:
        (calls,) = self.namespace.calls
        calls.forward += 1
        self.last_two = (self.last_two[1], calls.forward)
        for factor in self.last_two:
            self.by_kind["square"].append(self.gate(rows + factor / 10).square().sum())
            self.by_kind["sum"].append(self.gate(rows).sum())
        return rows


class Phase(Enum):
    FIRST, SECOND, THIRD = 1, 2, 3


class Mean(NamedTuple):
    value: torch.Tensor
    number: int


@dataclass(slots=True)
class Total:
    value: float = 0.0


class Measured(nn.Module):
    """States in numbers and arrays of NumPy, a member of an enum, a named tuple, a tuple with a list, and slots."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.largest, self.total = Phase.FIRST, np.float32(1.0), Total()
        self.sums, self.mean, self.nested = np.zeros(WIDTH, np.float32), Mean(torch.zeros(WIDTH), 0), (0, [0])

    def forward(self, rows: Rows) -> Rows:
        before = torch.from_numpy(self.sums.copy()) + float(self.largest) + self.total.value + self.phase.value
        before = (before + self.mean.value + self.nested[1][0]) / 100
        sums = rows.detach().sum((0, 1))
        self.sums *= 0.5
        self.sums += sums.numpy()
        self.largest = np.float32(0.5) * self.largest + np.float32(sums.abs().max().item())
        self.total.value += 1.0
        self.phase = Phase(self.phase.value % 3 + 1)
        self.mean = Mean(self.mean.value / 2 + sums, self.mean.number + 1)
        self.nested[1][0] += 1
        return rows + before


def with_losses_by_kind(model: Any, rows: Rows) -> torch.Tensor:
    by_kind = model[3].by_kind
    total = model(rows).square().sum() + sum(by_kind["square"]) + sum(by_kind["sum"])
    for losses in by_kind.values():
        losses.clear()
    return total


def with_auxiliary_losses(model: Any, rows: Rows) -> torch.Tensor:
    losses = model[3].losses
    total = model(rows).square().sum() + sum(losses)
    losses.clear()
    return total


def plain(model: nn.Module, rows: Rows) -> torch.Tensor:
    return model(rows).square().sum()


def with_teacher(model: nn.Module, rows: Rows) -> torch.Tensor:
    """Pseudo-labels of the model itself, without dropout."""
    out = model(rows)
    model.eval()
    with torch.no_grad():
        targets = model(rows + 0.1)
    model.train()
    return F.mse_loss(out, targets, reduction="sum") + out.square().sum()


def with_frozen_layer(model: Any, rows: Rows) -> torch.Tensor:
    total = model(rows).square().sum()
    model[2].requires_grad_(False)
    total = total + model(rows).sum()
    model[2].requires_grad_(True)
    return total


def with_switched_gradients(model: nn.Module, rows: Rows) -> torch.Tensor:
    out = model(rows)
    torch.set_grad_enabled(False)
    targets = model(rows + 1)
    torch.set_grad_enabled(True)
    return (out - targets).square().sum()


def growing_rows(number: int) -> Rows:
    return torch.randn(ROWS, 3 + 2 * number, WIDTH, generator=torch.Generator().manual_seed(number))


Loss = Callable[[Any, Rows], torch.Tensor]
CASES: dict[str, tuple[type[nn.Module], Loss | type[LossOfItsOwn]]] = {
    "modes": (nn.Identity, with_teacher),
    "requires_grad": (nn.Identity, with_frozen_layer),
    "whether gradients are computed": (nn.Identity, with_switched_gradients),
    "a buffer that grows": (Growing, plain),
    "features in a new attribute": (Drawn, plain),
    "features, a flag and a counter": (Filled, plain),
    "a buffer without a shape": (Observer, plain),
    "a tensor in an attribute that was None": (Late, plain),
    "tensors in attributes and a buffer that are added": (Added, plain),
    "large tensors in attributes": (Queue, plain),
    "tensors in a tuple and a list": (Paired, plain),
    "numbers and arrays of NumPy, an enum, a named tuple, slots": (Measured, plain),
    "a loss with a buffer that the model lacks": (nn.Identity, LossOfItsOwn),
    "losses in a list, counts in a dict, and a history": (Balanced, with_auxiliary_losses),
    "losses in lists within a dict, counts in objects and a tuple": (Routed, with_losses_by_kind),
}


class Training:
    def __init__(self, layer: type[nn.Module], loss: Loss | type[LossOfItsOwn]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), layer())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self._loss = loss() if isinstance(loss, type) else loss
        torch.manual_seed(1)

    def micro_step(self, rows: Rows) -> None:
        self._loss(self.model, rows).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def by_hand(self, sizes: list[int]) -> list[torch.Tensor]:
        """The final state after steps with micro-batches of these sizes."""
        for number, size in enumerate(sizes):
            for rows in growing_rows(number).split(size):
                self.micro_step(rows)
            self.update()
        return self.state()

    def recovered(self, fault: Fault, *, failing: int) -> tuple[list[torch.Tensor], list[int]]:
        """The final state if the first micro-step of the step ``failing`` has this fault, and the sizes."""
        step = RecoverableStep(
            self.model, self.micro_step, micro_batch_size=LARGE, optimizer=self.optimizer, on_event=lambda _: None
        )
        sizes: list[int] = []
        for number in range(STEPS):
            wrap_micro_steps(step, partial(under, {0: fault} if number == failing else {}))
            step(growing_rows(number))
            sizes.append(step.micro_batch_size)
            self.update()
        step.close()
        return self.state(), sizes

    def search(self) -> None:
        def train_step(rows: Rows) -> None:
            self.micro_step(rows)
            self.update()

        limit = "9MiB" if isinstance(self.model[3], Queue) else "1MiB"
        options: Any = {"model": self.model, "optimizer": self.optimizer, "memory_limit": limit, "max_batch_size": 64}
        assert find_max_batch_size(train_step, lambda size: torch.ones(size, 9, WIDTH), **options).batch_size > 1

    def state(self) -> list[torch.Tensor]:
        return [*self.model.state_dict().values(), *self.model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize(("case", "failing"), [*zip(CASES, itertools.repeat(1)), ("features in a new attribute", 0)])
def test_recovery_anywhere_in_a_micro_step_equals_a_loop_by_hand(case: str, failing: int) -> None:
    # A size that has never fitted is not tried again soon.
    expected_sizes = [SMALL] * STEPS if failing == 0 else [LARGE, SMALL, LARGE]
    expected = Training(*CASES[case]).by_hand(expected_sizes)
    place = 1
    while True:
        fault = Fault(place)
        found, sizes = Training(*CASES[case]).recovered(fault, failing=failing)
        if not fault.has_struck:
            break
        assert sizes == expected_sizes
        assert same_bits(found, expected), place
        place += 8
    assert place > 12


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("case", [*CASES.values(), (lambda: torch.jit.script(nn.Linear(WIDTH, WIDTH)), plain)])
def test_neither_a_dry_run_nor_a_search_changes_what_follows(case: Any) -> None:
    expected = Training(*case).by_hand([LARGE] * STEPS)
    assert same_bits(Training(*case).recovered(Fault(None), failing=0)[0], expected)
    searched = Training(*case)
    searched.search()
    assert same_bits(searched.by_hand([LARGE] * STEPS), expected)


def test_a_search_restores_a_tensor_in_an_attribute_as_it_does_a_buffer() -> None:
    searched: Any = Training(Recurrent, plain)
    searched.search()
    assert searched.model[3].state.tolist() == [0.0] * WIDTH


class Hooked(nn.Module):
    """Installs a hook in its first forward pass, and a flag which says so, as transformers does."""

    is_hooked = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = list[int]()

    def forward(self, rows: Rows) -> Rows:
        if not self.is_hooked:
            self.hook()
            self.is_hooked = True
        return self.linear(rows)

    def hook(self) -> Any:
        return self.linear.register_forward_hook(lambda *_: self.calls.append(1))


class HookedByHandles(Hooked):
    """Installs a hook unless there is a handle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.handles = list[Any]()

    def forward(self, rows: Rows) -> Rows:
        if not self.handles:
            self.handles.append(self.hook())
        return self.linear(rows)


@pytest.mark.parametrize("layer_type", [Hooked, HookedByHandles])
def test_a_hook_that_the_first_forward_pass_installs_is_installed_once(layer_type: type[nn.Module]) -> None:
    training = Training(layer_type, plain)
    training.recovered(Fault(8), failing=0)
    layer: Any = training.model[3]
    layer.calls.clear()
    training.model(growing_rows(0))
    assert len(layer.calls) == 1


class Remembering(nn.Module):
    """Keeps its last activations, for whoever wants to look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.by_name, self.output = torch.zeros(1), dict[str, torch.Tensor](), {"last": torch.zeros(1)}

    def forward(self, rows: Rows) -> Rows:
        self.last = rows.detach()
        self.by_name["last"] = rows.detach() + 0
        self.output = {"last": rows.detach() + 0}
        return rows


def test_activations_that_a_module_keeps_do_not_outlive_the_next_forward_pass() -> None:
    training = Training(Remembering, plain)
    layer: Any = training.model[3]
    step = RecoverableStep(training.model, training.micro_step, micro_batch_size=1)
    long_rows, alive = torch.zeros(2, 2**18 // WIDTH + 1, WIDTH), list[bool]()
    step(long_rows)
    training.update()
    before = [weakref.ref(one) for one in (layer.last, layer.by_name["last"], layer.output["last"])]
    layer.register_forward_hook(lambda *_: alive.append(any(one() is not None for one in before)))
    step(long_rows)
    assert layer.last.nbytes > 2**20
    assert not alive[0]


@pytest.mark.parametrize("needs_gradients", [True, False])
def test_gradients_of_samples_are_those_of_one_pass(needs_gradients: bool) -> None:
    """As in split learning, where samples are activations of another model, and of adversarial samples in a list."""

    def gradient(fault: Fault) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 1)
        samples: Any = growing_rows(0).requires_grad_() if needs_gradients else list(growing_rows(0))

        def micro_step(rows: Any) -> None:
            if not needs_gradients:
                rows = torch.stack([one.requires_grad_() for one in rows])
            model(rows).square().sum().backward()

        step = RecoverableStep(model, micro_step, micro_batch_size=LARGE, on_event=lambda _: None)
        step.dry_run(samples)
        wrap_micro_steps(step, partial(under, {1: fault}))
        step(samples)
        if needs_gradients:
            assert samples.grad is not None
            return samples.grad
        return torch.stack([one.grad for one in samples])

    fault = Fault(0)
    torch.testing.assert_close(gradient(fault), gradient(Fault(None)))
    assert fault.has_struck


def test_generators_and_buffers_that_come_after_the_dry_run_are_restored() -> None:
    """A generator for each step, as of ``set_epoch``, and the average of a layer of torch's, by a hook."""

    def trained(sizes: list[int] | None) -> list[float]:
        torch.manual_seed(0)
        model, found = nn.Linear(WIDTH, 2), []
        generator = torch.Generator()

        def follow(layer: nn.Module, given: tuple[Rows], _: Rows) -> None:
            layer.mean.mul_(0.5).add_(given[0].mean())  # pyright: ignore[reportCallIssue]

        def micro_step(rows: Rows) -> torch.Tensor:
            loss = model(rows + torch.randn(rows.shape, generator=generator)).square().sum()
            loss.backward()
            return loss.detach()

        step = RecoverableStep(model, micro_step, micro_batch_size=LARGE, on_event=lambda _: None)
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            if sizes is None:
                wrap_micro_steps(step, partial(under, {1: Fault(3)} if number == 2 else {}))
                found.append(step(growing_rows(number)).item())
            else:
                found.append(sum(map(micro_step, growing_rows(number).split(sizes[number]))).item())  # pyright: ignore
            model.zero_grad()
            if number == 0:
                model.register_buffer("mean", torch.zeros(()))
                model.register_forward_hook(follow)
        return [*found, model.get_buffer("mean").item()]

    assert trained(None) == trained([LARGE, LARGE, SMALL])

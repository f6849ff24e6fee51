"""After ``restore_on_exit`` everything is as before, bit for bit, also after an exception.

Models sharded by FSDP2 are in ``test_vote.py``.
"""

import contextlib
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchao.optim.subclass_8bit import OptimState8bit

from tests.engine.test_optimizers import picture
from tests.support.faults import same_bits
from torchtune_adaptive.engine.distributed.attributes import KeptAttributes
from torchtune_adaptive.engine.distributed.snapshot import (
    KeptBuffers,
    KeptTensors,
    RandomStates,
    UnchangedParameters,
    keep_own_generators,
    keep_random_states,
    restore_on_exit,
    tensor_places,
)
from torchtune_adaptive.testing import Fault, out_of_memory

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adam amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "adamw, rate a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2)),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),  # has state from the start
}


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    random.gauss(0, 1)  # each keeps a second normal number for the next time
    np.random.randn()


class Trainee:
    """A model with a buffer that training writes, a frozen layer, and dropout. Always starts from the same state."""

    def __init__(self, kind: str = "adamw", *, warm_steps: int = 0) -> None:
        seed_all(0)
        layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 6), nn.Linear(6, 2)]
        self.model: Any = nn.Sequential(*layers)
        self.model.register_buffer("replaced", torch.zeros(()))
        self.frozen = layers[3]
        self.frozen.requires_grad_(False)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = self.make_optimizers(kind)
        self.optimizer = self.optimizers[0]
        for _ in range(warm_steps):
            self.step()

    def make_optimizers(self, kind: str) -> list[torch.optim.Optimizer]:
        return [OPTIMIZERS[kind](self.trained)]

    def step(self) -> float:
        """A train step on random data; returns the loss."""
        self.model.replaced = self.model.replaced + 1
        loss = self.model(torch.randn(5, 6)).square().sum() * random.random() + np.random.rand()
        loss.backward()
        self.step_optimizers()
        return loss.item()

    def step_optimizers(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


class OptimizerPerParameter(Trainee):
    """Each parameter has its own optimizer, which steps inside backward, as with torchtune's ``optimizer_in_bwd``."""

    def make_optimizers(self, kind: str) -> list[torch.optim.Optimizer]:
        optimizers = {parameter: OPTIMIZERS[kind]([parameter]) for parameter in self.trained}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # pyright: ignore[reportArgumentType]
            optimizers[parameter].zero_grad()  # pyright: ignore[reportArgumentType]

        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(step)
        return list(optimizers.values())

    def step_optimizers(self) -> None:
        """Nothing is left to do after backward."""


def picture_of(trainee: Trainee) -> list[Any]:
    """Everything that a train step can change: values, and the identity of tensors and of other objects."""
    model, generators = trainee.model, [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]
    modes = [module.training for module in model.modules()]
    held = picture([*model.parameters(), *model.buffers(), *trainee.optimizers], {})[1]  # without the list itself
    return [held, modes, generators]


# ---- one process


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("warm_steps", [0, 2], ids=["fresh", "warm"])
@pytest.mark.parametrize("trainee_class", [Trainee, OptimizerPerParameter])
def test_all_state_is_restored_after_train_steps_and_gradients_are_removed(
    trainee_class: type[Trainee], kind: str, warm_steps: int
) -> None:
    trainee = trainee_class(kind, warm_steps=warm_steps)
    trainee.frozen.eval()
    before = picture_of(trainee)
    for parameter in trainee.trained:
        parameter.grad = torch.ones_like(parameter)
    with restore_on_exit(trainee.model, trainee.optimizers):
        trainee.step()
        for optimizer in trainee.optimizers:
            optimizer.param_groups[0]["weight_decay"] = 7
        trainee.step()
        trainee.frozen.train()
        trainee.model.eval()
        assert picture_of(trainee) != before
    assert picture_of(trainee) == before


def fail_in_forward(trainee: Trainee) -> None:
    trainee.model.register_forward_hook(lambda *_: out_of_memory())
    trainee.step()


def fail_in_backward(trainee: Trainee) -> None:
    next(trainee.model.parameters()).register_post_accumulate_grad_hook(lambda _: out_of_memory())
    trainee.step()


def fail_in_mid_optimizer(trainee: Trainee) -> None:
    trainee.model(torch.randn(5, 6)).sum().backward()
    with Fault(7):
        trainee.optimizer.step()


@pytest.mark.parametrize(
    ("trainee_class", "fail"),
    [
        (Trainee, fail_in_forward),
        (Trainee, fail_in_backward),
        (Trainee, fail_in_mid_optimizer),
        (OptimizerPerParameter, fail_in_backward),  # when the optimizers of the later layers have stepped
    ],
)
@pytest.mark.parametrize("warm_steps", [0, 2], ids=["fresh", "warm"])
def test_all_state_is_restored_after_a_step_that_fails(
    trainee_class: type[Trainee], fail: Callable[[Trainee], None], warm_steps: int
) -> None:
    trainee = trainee_class(warm_steps=warm_steps)
    before = picture_of(trainee)

    def try_it() -> None:
        with restore_on_exit(trainee.model, trainee.optimizers):
            trainee.step()
            trainee.model.eval()
            fail(trainee)

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        try_it()
    assert picture_of(trainee) == before


# ---- random generators and buffers alone


def draw() -> list[float]:
    """Numbers from each random generator."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_random_generators_are_kept_where_numpy_was_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    states = RandomStates()
    drawn = random.random(), torch.rand(1).item()
    states.restore()
    assert (random.random(), torch.rand(1).item()) == drawn


@pytest.mark.parametrize("error", [None, KeyError()])
def test_random_generators_are_restored_also_after_a_failure(error: Exception | None) -> None:
    own = torch.Generator().manual_seed(5)
    states = RandomStates(generators=[own])
    drawn = draw(), torch.rand(1, generator=own)
    states.restore()
    with contextlib.suppress(KeyError), keep_random_states([own]):
        draw()
        torch.rand(1, generator=own)
        if error is not None:
            raise error
    assert (draw(), torch.rand(1, generator=own)) == drawn


def test_changed_buffers_are_found_whatever_changed_them() -> None:
    written, through_a_view, unseen, read = (torch.ones(3) for _ in range(4))
    kept = KeptTensors([read, written, through_a_view, unseen])
    assert kept.changed() == []
    written.add_(1)
    through_a_view[1:].zero_()
    unseen.data.mul_(2)  # this does not increase the version counter
    read.sum()
    assert [id(buffer) for buffer in kept.changed()] == [id(buffer) for buffer in (written, through_a_view, unseen)]
    kept.restore()
    assert kept.changed() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.running_mean.add_(1),
        lambda model: setattr(model, "running_mean", torch.full((2,), 5.0)),
        lambda model: setattr(model.running_mean, "data", torch.full((2,), 5.0)),
        lambda model: setattr(model, "running_mean", torch.full((4,), 5.0)),
        lambda model: setattr(model.running_mean, "data", torch.full((4,), 5.0)),
    ],
    ids=["in place", "another tensor", "another storage", "another shape", "another shape of the storage"],
)
def test_renewed_copies_are_of_the_buffers_after_a_change_between_steps(change: Callable[[Any], Any]) -> None:
    model = nn.BatchNorm1d(2)
    kept = KeptBuffers(tensor_places(list(model.modules())))
    change(model)
    buffer, values = model.running_mean, [one.clone() for one in model.buffers()]
    kept = kept.renewed()
    for one in model.buffers():
        one.zero_()
    model.running_mean = torch.ones(1)
    kept.restore()
    assert model.running_mean is buffer
    assert same_bits(list(model.buffers()), values)


def test_a_wrapper_whose_own_copy_shares_its_memory_is_restored() -> None:
    """torchao's 8-bit optimizer states return themselves when copied to the device that they are on."""
    state = OptimState8bit.zeros((4096,), True, 256, torch.device("cpu"))
    state.copy_(torch.linspace(-1, 1, 4096))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"exp_avg": state}
    codes, scale = state.codes.clone(), state.scale.clone()
    with restore_on_exit(model, [optimizer]):
        state.copy_(torch.linspace(3, -2, 4096))
        assert not torch.equal(state.codes, codes)
    assert optimizer.state[model.weight]["exp_avg"] is state
    assert torch.equal(state.codes, codes)
    assert torch.equal(state.scale, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(lambda values: values[:8], id="whole words"),
        pytest.param(lambda values: values[3:10], id="neither begins nor ends at a word"),
        pytest.param(lambda values: values.view(4, 4).t(), id="transposed"),
        pytest.param(lambda values: values.view(2, 8)[1:, :1].t(), id="one element with a stride"),
        pytest.param(lambda values: values[0], id="a number"),
    ],
)
def test_a_frozen_parameter_of_any_type_and_layout_is_seen_to_change(
    part: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    model = nn.Module()
    model.same = nn.Parameter(torch.zeros(0), requires_grad=False)
    model.changed = nn.Parameter(part(torch.ones(16).to(dtype)), requires_grad=False)
    frozen = UnchangedParameters(model.named_parameters())
    assert frozen.first_changed() == ""
    last = model.changed[..., -1] if model.changed.dim() > 0 else model.changed
    last.zero_()
    assert frozen.first_changed() == "changed"


def test_a_frozen_bias_that_a_layer_casts_when_it_is_first_used_has_not_changed() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    frozen = UnchangedParameters(model.named_parameters())
    model.bias.data = model.bias.data.half()
    assert frozen.first_changed() == ""
    model.weight.add_(1)
    assert frozen.first_changed() == "weight"


class Augments:
    """Draws from generators of its own."""

    def __init__(self) -> None:
        self.generators = [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)]
        self.of_torch = {"inner": torch.Generator().manual_seed(0)}

    def draw(self) -> list[float]:
        return [*(one.random() for one in self.generators), torch.rand((), generator=self.of_torch["inner"]).item()]


def test_generators_of_a_data_sets_own_are_restored_also_after_an_error() -> None:
    inner = Augments()

    def sample() -> list[float]:
        return inner.draw()

    expected = Augments().draw()
    with contextlib.suppress(KeyError), keep_own_generators(len, sample):
        assert inner.draw() == expected
        raise KeyError
    assert inner.draw() == expected
    assert inner.draw() != expected


def test_parameters_that_a_module_lists_are_no_attributes_to_restore() -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.listed = list(self.layer.parameters())  # as `DistributedDataParallel` does

    model = Listing()
    kept = KeptAttributes([model])
    with torch.no_grad():
        model.layer.weight.fill_(3.0)
    kept.restore()
    assert (model.layer.weight == 3.0).all()
    assert model.listed[0] is model.layer.weight


@pytest.mark.usefixtures("group_of_one")
def test_buffers_that_a_wrapper_lists_are_kept_once_by_the_caller() -> None:
    model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(2))
    modules = list(model.modules())
    kept = KeptAttributes(modules, tensor_places(modules))
    model.module.running_mean.fill_(3.0)
    kept.restore()
    assert (model.module.running_mean == 3.0).all()

"""An optimizer whose state was made before training trains to the same bits as one that made it at its first step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.toys import Prepared
from torchtune_adaptive import InputError, RecoverableStep, find_max_batch_size
from torchtune_adaptive.engine.recovery.optimizer_state import allocate_state, check_optimizers, drop_unused_states
from torchtune_adaptive.testing import Fault

STEPS = 5
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
    "amsgrad, fused": {"amsgrad": True, "fused": True},
    "rate a tensor": {"lr": torch.tensor(0.1)},
    "rate a tensor, fused": {"lr": torch.tensor(0.1), "fused": True},
    "weight decay, foreach": {"weight_decay": 0.3, "foreach": True},
    "maximize": {"maximize": True, "weight_decay": 0.3},
}


class Trainee:
    """Parameters with zeros of both signs, one of them frozen, in two groups; the same values every time."""

    def __init__(
        self, kind: Callable[..., torch.optim.Optimizer] = AdamW, *, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(self.values(size).to(dtype)) for size in (5, 7, 3, 4)]
        self.frozen = self.parameters[1].requires_grad_(False)
        self.trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        groups = [{"params": self.parameters[:2]}, {"params": self.parameters[2:], "betas": (0.5, 0.7)}]
        self.optimizer = kind(groups, **({"lr": 0.1} | options))
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    @staticmethod
    def values(size: int) -> torch.Tensor:
        return torch.cat([torch.tensor([0.0, -0.0]), torch.randn(size)])

    def bits(self) -> list[list[int]]:
        """The parameters' bits, which differ between 0.0 and -0.0, unlike their values."""
        return [parameter.detach().view(BITS[parameter.dtype]).tolist() for parameter in self.parameters]

    def train(self) -> list[list[list[int]]]:
        """The parameters' bits after each of some steps."""
        generator = torch.Generator().manual_seed(1)
        found = []
        for _ in range(STEPS):
            for parameter in self.trained:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            found.append(self.bits())
        return found

    def has_its_rates(self) -> bool:
        """Whether the rates are the objects that they were, with their values."""
        groups = self.optimizer.param_groups
        return all(
            group["lr"] is rate and float(rate) == pytest.approx(0.1)
            for group, rate in zip(groups, self.rates, strict=True)
        )

    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)


every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


@every_option
@pytest.mark.parametrize(("kind", "dtype"), [(AdamW, torch.float32), (Adam, torch.bfloat16)], ids=str)
def test_the_state_is_that_from_before_a_first_step_and_nothing_else_changes(
    kind: Any, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    untouched, prepared = Trainee(kind, dtype=dtype, **options), Trainee(kind, dtype=dtype, **options)
    before = prepared.bits()
    assert allocate_state(prepared.optimizer)
    assert prepared.bits() == before
    assert not prepared.has_gradients()
    assert prepared.has_its_rates()
    state = prepared.optimizer.state
    assert [id(parameter) for parameter in state] == [id(parameter) for parameter in prepared.trained]
    assert all(value.count_nonzero() == 0 for values in state.values() for value in values.values())
    places = [value.data_ptr() for values in state.values() for value in values.values()]
    trained = untouched.train()
    assert prepared.train() == trained
    assert trained[0] != before
    assert [value.data_ptr() for values in state.values() for value in values.values()] == places  # none is made later
    assert [set(values) for values in state.values()] == [set(one) for one in untouched.optimizer.state.values()]


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_scheduler_does_not_learn_of_the_step(has_stepped: bool) -> None:
    """The scheduler's wrapper of ``step`` sets a flag, by which it detects that it is stepped too early."""
    trainee = Trainee()
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainee.optimizer, lambda step: 1 / (1 + step))
    if has_stepped:
        trainee.train()
        trainee.optimizer.state.clear()
    before = vars(trainee.optimizer).get("_opt_called")
    assert allocate_state(trainee.optimizer)
    assert vars(trainee.optimizer).get("_opt_called") is before is (True if has_stepped else None)
    assert scheduler.get_last_lr() == [group["lr"] for group in trainee.optimizer.param_groups] == [0.1, 0.1]


def test_what_a_user_does_before_and_after_each_step_is_not_done() -> None:
    trainee = Trainee()
    before, after, after_any = list[Any](), list[Any](), list[Any]()
    trainee.optimizer.register_step_pre_hook(lambda *_: before.append(trainee.bits()))
    trainee.optimizer.register_step_post_hook(lambda *_: after.append(trainee.bits()))
    handle = register_optimizer_step_post_hook(lambda *_: after_any.append(trainee.bits()))
    assert allocate_state(trainee.optimizer)
    assert before == after == after_any == []
    assert trainee.train() == after == after_any
    assert len(before) == STEPS
    handle.remove()


# ---- states of parameters that are not used


def test_states_of_parameters_without_gradients_are_dropped_and_training_is_as_if_they_had_never_been() -> None:
    untouched, prepared = Trainee(), Trainee()
    for trainee in (untouched, prepared):
        trainee.trained.pop(1)  # `train` gives it no gradients
    assert allocate_state(prepared.optimizer)
    drop_unused_states([prepared.optimizer], prepared.trained)
    assert [id(one) for one in prepared.optimizer.state] == [id(one) for one in prepared.trained]
    assert prepared.train() == untouched.train()
    assert len(prepared.optimizer.state) == len(untouched.optimizer.state) == 2


def test_no_state_is_dropped_that_a_step_has_created() -> None:
    trainee = Trainee()
    trainee.train()
    before = dict(trainee.optimizer.state)
    drop_unused_states([trainee.optimizer], [])
    assert dict(trainee.optimizer.state) == before
    other = Adagrad(trainee.trained)  # it has zeros from the start
    drop_unused_states([other], [])
    assert len(other.state) == len(trainee.trained)


# ---- what is left alone


class OwnAdamW(AdamW):
    """A subclass, which may behave differently."""


def sgd(groups: Any, *, lr: float) -> torch.optim.Optimizer:
    for group in groups:
        group.pop("betas", None)
    return SGD(groups, lr=lr, momentum=0.9)


def adamw_with_eps_zero_in_one_group(groups: Any, *, lr: float) -> torch.optim.Optimizer:
    return AdamW([groups[0], {**groups[1], "eps": 0.0}], lr=lr)


def adamw_that_has_stepped(groups: Any, *, lr: float) -> torch.optim.Optimizer:
    optimizer = AdamW(groups, lr=lr)
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("kind", [sgd, OwnAdamW, adamw_with_eps_zero_in_one_group, adamw_that_has_stepped])
def test_an_optimizer_that_might_be_changed_is_left_alone(kind: Callable[..., torch.optim.Optimizer]) -> None:
    trainee = Trainee(kind)
    state = [value for values in trainee.optimizer.state.values() for value in values.values()]
    before, versions = trainee.bits(), [one._version for one in (*trainee.parameters, *state)]
    assert not allocate_state(trainee.optimizer)
    assert len(trainee.optimizer.state) == (len(trainee.trained) if state else 0)
    assert trainee.bits() == before
    assert [one._version for one in (*trainee.parameters, *state)] == versions
    assert trainee.has_its_rates()


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float16, 1e-8), (torch.float32, 1e-50)], ids=["float16", "tiny"])
def test_parameters_stay_if_eps_is_zero_in_their_own_type(dtype: torch.dtype, eps: float) -> None:
    trainee = Trainee(dtype=dtype, eps=eps)
    before = trainee.bits()
    allocate_state(trainee.optimizer)
    assert trainee.bits() == before


# ---- out of memory half way


@pytest.mark.parametrize("options", [OPTIONS["amsgrad"], OPTIONS["rate a tensor, fused"]], ids=str)
def test_out_of_memory_half_way_leaves_nothing_behind(options: dict[str, Any]) -> None:
    before, trained = Trainee(**options).bits(), Trainee(**options).train()
    counted = Trainee(**options)
    with Fault(None) as operations:
        allocate_state(counted.optimizer)
    assert operations.count > 10
    for place in range(operations.count):
        trainee = Trainee(**options)
        with pytest.raises(torch.OutOfMemoryError, match="on purpose"), Fault(place):
            allocate_state(trainee.optimizer)
        assert len(trainee.optimizer.state) == 0
        assert not trainee.has_gradients()
        assert trainee.has_its_rates()
        assert trainee.bits() == before
        assert trainee.train() == trained


# ---- optimizers that cannot train the model


class Holding(SGD):
    """An optimizer of some parameters that leaves the others to another optimizer."""

    def __init__(self, parameters: list[nn.Parameter], other: torch.optim.Optimizer) -> None:
        super().__init__(parameters, lr=0.1)
        self.others = {"other": other}


def why_refused(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    with pytest.raises(InputError) as raised:
        check_optimizers([optimizer], model)
    return str(raised.value)


@pytest.mark.usefixtures("group_of_one")
def test_an_optimizer_from_before_fully_shard_is_told_to_come_after_it() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    early = AdamW(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    check_optimizers([AdamW(model.parameters())], model)
    expected = "of shape (3, 4) that `optimizer` trains: create the optimizer after what replaces parameters (`fully_sh"
    assert expected in why_refused(early, model)
    assert expected in why_refused(Holding(list(model[1].parameters()), early), model)


@pytest.mark.parametrize("way", ["assign", "to_empty"])
def test_an_optimizer_whose_parameters_were_replaced_is_told_to_come_later(way: str) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    early = AdamW(model.parameters())
    if way == "assign":
        model.load_state_dict(nn.Linear(4, 3).state_dict(), assign=True)
    else:
        model.to_empty(device="cpu")
    check_optimizers([AdamW(model.parameters())], model)
    assert "(`to_empty`, `load_state_dict(assign=True)`)" in why_refused(early, model)


def test_an_optimizer_of_another_model_is_told_to_bring_both() -> None:
    model, other, frozen = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(1, 2).requires_grad_(False)
    both = AdamW([*frozen.parameters(), *model.parameters(), *other.parameters()])
    assert why_refused(both, model).endswith("that `optimizer` trains: pass several models in an `nn.ModuleList`.")
    check_optimizers([both], nn.ModuleList([model, other]))


def test_an_optimizer_without_state_of_torch_is_refused_by_name() -> None:
    """As torchao's ``CPUOffloadOptimizer``."""
    model = nn.Linear(4, 3)
    assert "`Prepared` has no `state` and hooks" in why_refused(Prepared(AdamW(model.parameters())), model)


def search(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    def train_step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()

    options: Any = {"model": model, "optimizer": optimizer, "memory_limit": "64KiB", "max_batch_size": 4}
    return find_max_batch_size(train_step, lambda rows: torch.ones(rows, 4), **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    def micro_step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    recoverable = RecoverableStep(model, micro_step, micro_batch_size=2, optimizer=optimizer)
    recoverable(torch.ones(4, 4))
    return recoverable


@pytest.mark.filterwarnings("ignore:Lazy modules")  # of older versions of torch
@pytest.mark.parametrize("use", [search, step])
def test_a_lazy_module_is_told_to_run_forward_first(use: Callable[[nn.Module, torch.optim.Optimizer], object]) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LazyLinear(3))
    optimizer = AdamW(model.parameters())
    with pytest.raises(InputError, match=r"`1.weight` of a lazy module has no shape .* run one first"):
        use(model, optimizer)
    model(torch.ones(2, 4))
    assert use(model, optimizer)

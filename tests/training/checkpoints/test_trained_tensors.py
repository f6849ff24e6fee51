"""Trained tensors have the same names and values however the model is wrapped, and with every optimizer."""

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.testing._internal.two_tensor import TwoTensor

from torchtune_adaptive.training.checkpoints.tensors import TrainedTensors


class Halves(torch.optim.SGD):
    """An optimizer whose state is a wrapped pair of tensors, a tensor of another shape and a count."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.numel() > 1:
                state = self.state[parameter]
                if not state:
                    state.update(sums=TwoTensor(torch.zeros(7), torch.ones(7)), largest=torch.zeros(2), count=0)
                    state["largest"].is_paged = True
                state["count"] += 1
                state["sums"].a += parameter.grad.sum()
                state["sums"].b *= 2
                state["largest"][0] = parameter.grad.max()
                parameter.add_(state["sums"].a.sum() / state["sums"].b.sum() + state["count"], alpha=-1e-3)
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adamw, rate a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),  # has state from the start
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),  # has state of other shapes
    "parts": lambda parameters: Halves(parameters, lr=1e-2),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2),  # has scalars beside the step
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))  # has no dimension
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.scale * self.linear(x)


class Model(nn.Module):
    """Two layers and a head whose weight is the embedding's; the second layer is frozen except for its bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(4, 3)
        self.layers: Any = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[1].linear.weight.requires_grad_(False)
        self.layers[1].scale.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODEL_NAMES = [
    "model/embedding.weight",
    "model/layers.0.scale",
    "model/layers.0.linear.weight",
    "model/layers.0.linear.bias",
    "model/layers.1.linear.bias",
    "model/layers.0.seen",
    "model/layers.1.seen",
]


def step(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, times: int = 2) -> None:
    for _ in range(times):
        model(torch.tensor([[0, 1, 2, 3]])).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def trained(model: nn.Module, *optimizers: torch.optim.Optimizer, rank: int = 0, ranks: int = 1) -> TrainedTensors:
    return TrainedTensors(model, optimizers, rank=rank, ranks=ranks)


def metadata(tensors: dict[str, torch.Tensor]) -> dict[str, TensorStorageMetadata]:
    """The metadata that a checkpoint of ``tensors`` has."""
    return {
        name: TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [])
        for name, tensor in tensors.items()
    }


def take(tensors: TrainedTensors, saved: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    """Loads ``saved`` as a resumed run loads a checkpoint."""
    allocated = tensors.allocate(metadata(saved))
    assert allocated.keys() == saved.keys()
    for place, tensor in saved.items():
        allocated[place].copy_(tensor)
    tensors.load_options(options, chosen=[])


# ---- names


def test_trained_parameters_and_persistent_buffers_have_their_names_and_tied_ones_one_name() -> None:
    model = Model()
    tensors = trained(model, torch.optim.SGD(model.parameters())).tensors()
    assert list(tensors) == MODEL_NAMES
    assert tensors["model/embedding.weight"].data_ptr() == model.head.weight.data_ptr()  # not copied
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_names_do_not_depend_on_what_wraps_the_layers() -> None:
    model = Model()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    whole: Any = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.layers[0].linear.weight]["step"] = torch.tensor(1.0)
    assert any("_checkpoint_wrapped_module" in name for name, _ in whole.named_parameters())
    assert any(name.startswith("_orig_mod.layers.1._orig_mod") for name, _ in whole.named_parameters())
    names = list(trained(whole, optimizer).tensors())
    assert names == [*MODEL_NAMES, "optimizer/layers.0.linear.weight/step"]


def test_optimizer_state_is_named_by_its_parameter_and_that_of_frozen_ones_is_left_out() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, [optimizer])
    optimizer.state[model.layers[1].linear.weight]["step"] = torch.tensor(1.0)
    tensors = trained(model, optimizer).tensors()
    parameters = [name.removeprefix("model/") for name in MODEL_NAMES if "seen" not in name]
    expected = [f"optimizer/{name}/{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")]
    assert sorted(set(tensors) - set(MODEL_NAMES)) == sorted(expected)
    state = optimizer.state[model.layers[0].linear.weight]
    assert tensors["optimizer/layers.0.linear.weight/exp_avg"] is state["exp_avg"]


def test_each_of_several_optimizers_has_its_parameters() -> None:
    """As for steps within backward, where each parameter has one."""
    model = Model()
    optimizers = [torch.optim.SGD([one], lr=0.1, momentum=0.9) for one in model.parameters() if one.requires_grad]
    step(model, optimizers)
    names = [name for name in trained(model, *optimizers).tensors() if name.startswith("optimizer/")]
    assert sorted(names) == sorted(
        f"optimizer/{name.removeprefix('model/')}/momentum_buffer" for name in MODEL_NAMES if "seen" not in name
    )


# ---- a round trip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_model_and_optimizer_load_everything_and_train_the_same(name: str) -> None:
    model, other = Model(), Model()
    optimizer, other_optimizer = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    step(model, [optimizer], times=3)
    step(other, [other_optimizer])  # this state is dropped
    first, second = trained(model, optimizer), trained(other, other_optimizer)
    saved = copy.deepcopy(first.tensors())
    options = json.loads(json.dumps(first.options()))
    assert second.missing(metadata(saved)) == ""
    take(second, saved, options)
    assert other_optimizer.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert first.options() == second.options()
    step(model, [optimizer], times=3)
    step(other, [other_optimizer], times=3)
    after, other_after = first.tensors(), second.tensors()
    assert all(torch.equal(after[place], other_after[place]) for place in after)
    assert all(after[place].dtype == other_after[place].dtype for place in after)


@pytest.mark.parametrize("name", ["adamw", "adagrad"])
def test_a_model_of_another_type_has_states_of_its_type_as_if_trained_with_it(name: str) -> None:
    model, other = Model().bfloat16(), Model()
    for one in (model, other):
        del one.layers[0].scale, one.layers[1].scale  # scalars: the step's count looks like their state
        one.layers[0].scale = one.layers[1].scale = 2.0
    optimizer, other_optimizer = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    step(model, [optimizer])
    first = trained(model, optimizer)
    take(trained(other, other_optimizer), first.tensors(), json.loads(json.dumps(first.options())))
    step(other, [other_optimizer])
    states = [(one, other_optimizer.state[one]) for one in other.parameters() if one in other_optimizer.state]
    alike = [value for one, state in states for value in state.values() if getattr(value, "shape", ()) == one.shape]
    assert {value.dtype for value in alike} == {torch.float32}


def test_a_parameter_that_has_no_state_yet_has_none_afterwards() -> None:
    """As where the optimizer has not stepped, or the parameter had no gradient."""
    model, other = Model(), Model()
    optimizer, other_optimizer = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    model.layers[0].linear(torch.ones(3)).sum().backward()
    optimizer.step()
    step(other, [other_optimizer])
    saved = trained(model, optimizer)
    take(trained(other, other_optimizer), saved.tensors(), saved.options())
    linear = other.layers[0].linear
    assert set(other_optimizer.state) == {linear.weight, linear.bias}
    step(other, [other_optimizer])
    assert other_optimizer.state[other.embedding.weight]["step"] == 2


def test_state_of_another_librarys_optimizer_stays_where_the_optimizer_has_it() -> None:
    """For example, in paged memory."""
    model, other = Model(), Model()
    optimizer, other_optimizer = Halves(model.parameters(), lr=1e-2), Halves(other.parameters(), lr=1e-2)
    step(model, [optimizer])
    trained(other, other_optimizer).allocate(metadata(trained(model, optimizer).tensors()))
    state = other_optimizer.state[other.layers[0].linear.weight]
    assert state["largest"].is_paged
    assert type(state["sums"]) is TwoTensor
    assert all(parameter.grad is None for parameter in other.parameters())


@pytest.mark.parametrize(
    ("options", "device"),
    [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")],
    ids=["plain", "fused", "capturable"],
)
def test_state_has_its_saved_type_and_only_the_count_of_steps_may_be_on_the_host(
    options: dict[str, Any], device: str
) -> None:
    """The meta device stands for any device other than the host; kernels may read the count on the device."""
    model = nn.Linear(2, 2, bias=False, device="meta", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0].update(options)
    saved = {"optimizer/weight/step": torch.tensor(3.0), "optimizer/weight/exp_avg": torch.zeros(2, 2)}
    saved["model/weight"] = model.weight
    allocated = trained(model, optimizer).allocate(metadata(saved))
    assert allocated["optimizer/weight/step"].device.type == device
    assert allocated["optimizer/weight/exp_avg"].device.type == "meta"
    assert {tensor.dtype for place, tensor in allocated.items() if "optimizer" in place} == {torch.float32}


# ---- options


def test_an_option_that_the_config_has_changed_is_set_back_except_where_a_group_has_one_of_its_own() -> None:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.5, weight_decay=0.3, eps=1e-6)
    for group in optimizer.param_groups:  # as torchtune loads them
        group |= {"lr": 0.1, "eps": 1e-8, "weight_decay": group["weight_decay"] and 0.1}
    before = {"lr": 0.2, "eps": 1e-8, "weight_decay": 0.1}
    TrainedTensors(model, [optimizer], rank=0, ranks=1).reset_options(["lr", "weight_decay"], before=before)
    found = [[group[name] for name in ("lr", "eps", "weight_decay")] for group in optimizer.param_groups]
    assert found == [[0.5, 1e-8, 0.3], [0.5, 1e-8, 0.0]]


def test_a_rate_in_a_tensor_stays_in_that_tensor() -> None:
    """Compiled code refers to it."""
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.25)
    tensors = trained(model, torch.optim.AdamW(model.parameters(), lr=rate, foreach=False))
    options = json.loads(json.dumps(tensors.options()))
    rate.fill_(0.5)
    tensors.load_options(options, chosen=[])
    assert rate.item() == 0.25


# ---- what does not fit


@pytest.mark.parametrize(
    ("place", "size", "sentence"),
    [
        ("model/embedding.weight", (8, 3), "embedding.weight was [8, 3] and is [4, 3]"),
        ("model/layers.2.linear.bias", (3,), "layers.2.linear.bias was [3] and is not there"),
        ("model/layers.1.linear.bias", None, "layers.1.linear.bias was not there and is [3]"),
        ("optimizer/embedding.weight/more", (9,), ""),
    ],
)
def test_a_difference_from_the_saved_tensors_is_named_with_its_shapes(
    place: str, size: tuple[int, ...] | None, sentence: str
) -> None:
    model = Model()
    tensors = trained(model, torch.optim.AdamW(model.parameters()))
    saved = tensors.tensors()
    if size is None:
        del saved[place]
    else:
        saved[place] = torch.zeros(size)
    assert tensors.missing(metadata(saved)) == sentence


@pytest.mark.parametrize(("saved_ranks", "sentence"), [(1, "the optimizer's state is of 1 rank"), (2, "")])
def test_state_of_each_rank_alone_fits_only_the_same_number_of_ranks(saved_ranks: int, sentence: str) -> None:
    model = Model()
    tensors = trained(model, torch.optim.SGD(model.parameters()), ranks=2)
    own = {f"optimizer/embedding.weight/own/{rank}": torch.zeros(5) for rank in range(saved_ranks)}
    assert tensors.missing(metadata(tensors.tensors() | own)) == sentence


class Quantized(torch.Tensor):
    """A tensor with a layout of its own."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [(torch.zeros(2).as_subclass(Quantized), "Quantized"), ([torch.zeros(2)], "list"), ({"a": 1}, "dict")],
    ids=["a tensor of another kind", "a list", "a dictionary"],
)
def test_state_that_a_checkpoint_cannot_hold_is_named(value: Any, kind: str) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, [optimizer])
    tensors = trained(model, optimizer)
    assert tensors.unsavable() == ""
    optimizer.state[model.layers[0].linear.weight]["moments"] = value
    assert tensors.unsavable() == f"the optimizer's moments is a {kind}, neither a plain tensor nor a number"

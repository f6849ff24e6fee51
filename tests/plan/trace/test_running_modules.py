"""`RunningModules` names the running module in forward and in backward, as asked from inside of small real models."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchtune_adaptive.plan.trace.running_modules import RunningModules


class _Asking(torch.autograd.Function):
    """An identity whose backward asks which module runs."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, ask: Any) -> torch.Tensor:
        ctx.ask = ask
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.ask("backward")
        return gradients[0], None


class Layer(nn.Module):
    """A layer that asks which module runs, in forward and in backward."""

    def __init__(self, ask: Any, shared: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.shared = shared
        self._ask = ask

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.shared(self.inner(inputs))
        self._ask("forward")
        return _Asking.apply(hidden, self._ask)


class Shared(nn.Module):
    """A module shared by all layers, which asks as they do."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self._ask = ask

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._ask("forward")
        return _Asking.apply(inputs.sin(), self._ask)


class Model(nn.Module):
    """Layers, each checkpointed if ``checkpoints``; ``answers`` has a phase and a module name for each question."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.answers: list[tuple[str, str]] = []
        self.modules_asked: RunningModules | None = None
        shared = Shared(self.ask)
        self.layers = nn.ModuleList(Layer(self.ask, shared) for _ in range(2))
        self._checkpoints = checkpoints

    def ask(self, phase: str) -> None:
        assert self.modules_asked is not None
        self.answers.append((phase, self.modules_asked.now(phase)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = checkpoint(layer, inputs, use_reentrant=False) if self._checkpoints else layer(inputs)
        self.ask("forward")
        return inputs


FORWARD = [("forward", name) for name in ("layers.0.shared", "layers.0", "layers.1.shared", "layers.1", "model")]


def _modules_of(model: Model, *frozen: nn.Module) -> RunningModules:
    model.modules_asked = RunningModules([model, *frozen], [])
    return model.modules_asked


@pytest.mark.parametrize("with_threads", [False, True])
def test_the_innermost_module_is_named_and_in_backward_the_one_that_made_the_node(with_threads: bool) -> None:
    """What other threads run is ignored: compiled code is traced on one, whose autograd nodes have other numbers."""
    model = Model()
    first = model.layers[0]
    assert isinstance(first, Layer)

    def trace_elsewhere(*_: Any) -> None:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(first.inner, torch.ones(1, 2)).result()

    if with_threads:
        model.layers[1].register_forward_pre_hook(trace_elsewhere)
    with _modules_of(model):
        model(torch.ones(1, 2)).sum().backward()
    names = ["layers.1", "layers.1.shared", "layers.0", "layers.0.shared"]  # also for inputs without gradients
    assert model.answers == FORWARD + [("backward", name) for name in names]


def test_a_recomputed_forward_is_seen_although_it_stops_early() -> None:
    model = Model(checkpoints=True)
    with _modules_of(model) as modules:
        loss = model(torch.ones(1, 2, requires_grad=True)).sum()
        del model.answers[:]
        loss.backward()
        assert modules.now("clip") == "clip"  # no module is left running
    assert model.answers == [
        answer
        for name in ("layers.1", "layers.0")
        for answer in (("backward", name), ("backward", f"{name}.shared"), ("forward", f"{name}.shared"))
    ]


def test_outside_of_the_models_the_name_is_the_loss_the_batch_or_the_phase() -> None:
    model = Model()
    seen: list[str] = []
    with _modules_of(model) as modules:
        loss = nn.MSELoss()(
            _Asking.apply(model(torch.ones(1, 2)), lambda phase: seen.append(modules.now(phase))), torch.ones(1, 2)
        )
        loss.backward()
        seen += [modules.now(phase) for phase in ("forward", "loss", "backward", "clip", "optimizer", "")]
    assert seen == ["loss", "batch", "loss", "model", "clip", "optimizer", "model"]


def test_modules_of_a_frozen_model_have_a_name_of_their_own() -> None:
    trained, frozen = Model(), Model()
    frozen.modules_asked = _modules_of(trained, frozen)
    with frozen.modules_asked, torch.no_grad():
        frozen(torch.ones(1, 2))
    names = [name for _, name in frozen.answers]
    assert names[:2] + names[-1:] == ["frozen model.layers.0.shared", "frozen model.layers.0", "frozen model"]


def test_tensors_and_optimizer_state_have_the_name_of_their_module() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    found = list(RunningModules([model], [optimizer]).tensors())
    assert [name for name, _ in found] == ["0"] * 2 + ["1"] * 5 + ["0"] * 2 + ["1"] * 2
    assert found[0][1] is model[0].weight
    assert found[-1][1] is list(optimizer.state.values())[-1]

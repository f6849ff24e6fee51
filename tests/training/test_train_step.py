"""A step is the same however it is cut, is divided by the weight of its samples, and logs means.

The toy: a row is ``{"x": number, "weight": 0 or 1}``, the model one weight w, the loss of a row w * x. So the gradient
of a step is the mean x of the rows that count, whatever w is.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.training import create_optim_in_bwd_wrapper, register_optim_in_bwd_hooks

from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.stock.recipe import Activations
from torchtune_adaptive.training import train_step as train_step_module
from torchtune_adaptive.training.batch.micro_batches import MicroBatch
from torchtune_adaptive.training.batch.row_format import Row
from torchtune_adaptive.training.objectives import Loss, NextToken, Objective
from torchtune_adaptive.training.optimizers import OptimizerInBackward, OptimizerPolicy, OptimizerStep
from torchtune_adaptive.training.train_step import StepResult, TrainStep, own_norm_squared

CPU = torch.device("cpu")
W, LR = 2.0, 0.5
ROWS: list[Row] = [{"x": x, "weight": weight} for x, weight in ((1.0, 1), (2.0, 1), (30.0, 0), (9.0, 1), (4.0, 1))]
MEAN_X = (1 + 2 + 9 + 4) / 4


def toy_model() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, W)
    return model


def toy_objective(model: nn.Module) -> Objective:
    def objective(batch: dict[str, torch.Tensor]) -> Loss:
        counts = batch["weight"] > 0  # [B]
        losses = model(batch["x"][:, None]).squeeze(1)[counts]
        weight = counts.sum()
        metrics = {"mean_x": batch["x"][counts].sum(), "one": weight.double()}
        return Loss(losses.sum(), weight, num_tokens=torch.tensor(10 * len(counts)), metrics=metrics)

    return objective


def collate(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in ("x", "weight")}


def step_of(
    model: nn.Module,
    *,
    objective: Objective | None = None,
    policy: OptimizerPolicy | None = None,
    max_grad_norm: float | None = None,
    meter: MemoryMeter | None = None,
    collate: Any = collate,
    device: torch.device = CPU,
    stop_requested: Callable[[], bool] = lambda: False,
) -> TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return TrainStep(
        [model],
        objective or toy_objective(model),
        policy or OptimizerStep(model, [optimizer], ranks=1, max_grad_norm=max_grad_norm),
        collate=collate,
        device=device,
        phases=Phases([model], meter),
        meter=meter,
        stop_requested=stop_requested,
    )


def step_with(model: nn.Module, change: Callable[[Loss], Loss]) -> TrainStep:
    """A step whose loss is that of the toy, changed."""
    objective = toy_objective(model)
    return step_of(model, objective=lambda batch: change(objective(batch)))


def cut(rows: Sequence[Row], places: Sequence[int]) -> list[Sequence[Row]]:
    """``rows`` as micro-batches that end before ``places``."""
    ends = sorted({place for place in places if 0 < place < len(rows)})
    return [rows[first:end] for first, end in zip([0, *ends], [*ends, len(rows)], strict=True)]


def taken(step: TrainStep, micro_batches: Sequence[Sequence[Row]]) -> StepResult:
    """The result of a whole step."""
    return finished(step, functools.reduce(operator.add, (step.micro_step(MicroBatch(rows)) for rows in micro_batches)))


def finished(step: TrainStep, sums: Loss) -> StepResult:
    """The result of a step whose micro-steps gave ``sums``."""
    return StepResult.read(step.finish(sums), sums)


# ---- one step


@settings(max_examples=50)
@given(places=st.lists(st.integers(1, len(ROWS) - 1)))
def test_a_step_is_the_same_however_it_is_cut(places: list[int]) -> None:
    model = toy_model()
    result = taken(step_of(model, max_grad_norm=100.0), cut(ROWS, places))
    assert model.weight.item() == pytest.approx(W - LR * MEAN_X)
    assert result == StepResult(
        loss=pytest.approx(W * MEAN_X),  # pyright: ignore[reportArgumentType]
        weight=4.0,
        num_tokens=50,
        metrics={"mean_x": pytest.approx(MEAN_X), "one": pytest.approx(1.0)},  # pyright: ignore[reportArgumentType]
        grad_norm=pytest.approx(MEAN_X),  # pyright: ignore[reportArgumentType]
    )
    assert model.weight.grad is None


@pytest.mark.parametrize("places", [[], [2, 3]], ids=["whole", "cut"])
def test_a_micro_batch_without_weight_adds_nothing_even_if_its_mean_is_not_a_number(places: list[int]) -> None:
    model = toy_model()

    def or_nan(found: Loss) -> Loss:
        nothing = torch.zeros(()) / found.weight  # NaN where nothing counts, else 0
        metrics = {name: value + nothing for name, value in found.metrics.items()}
        return Loss(found.total + nothing, found.weight, found.num_tokens, metrics)

    result = taken(step_with(model, or_nan), cut(ROWS, places))
    assert model.weight.item() == pytest.approx(W - LR * MEAN_X)
    assert result.loss == pytest.approx(W * MEAN_X)
    assert result.metrics == {"mean_x": pytest.approx(MEAN_X), "one": 1.0}
    assert (result.weight, result.num_tokens) == (4, 50)


def test_the_row_of_a_rank_without_samples_does_not_count_whatever_its_batch_says() -> None:
    """A `collate_fn` may make labels from tokens, also for a row whose labels are all masked."""
    model = toy_model()
    step = step_of(model)
    silent = step.micro_step(MicroBatch([{"x": 7.0, "weight": 1}], share=0.0))
    assert model.weight.grad is not None  # FSDP2 reduces gradients on each rank
    result = finished(step, silent + step.micro_step(MicroBatch(ROWS)))
    assert model.weight.item() == pytest.approx(W - LR * MEAN_X)
    assert (result.loss, result.weight, result.num_tokens) == (pytest.approx(W * MEAN_X), 4, 50)
    assert result.metrics == {"mean_x": pytest.approx(MEAN_X), "one": 1.0}


def test_a_metric_named_loss_stands_for_the_loss() -> None:
    model = toy_model()
    step = step_with(model, lambda found: replace(found, metrics={"loss": 3.0 * found.weight, "x": found.weight}))
    result = taken(step, cut(ROWS, [1, 4]))
    assert (result.loss, result.metrics) == (3.0, {"x": 1.0})
    assert model.weight.item() == pytest.approx(W - LR * MEAN_X)


def test_logged_values_do_not_keep_the_graph() -> None:
    model = toy_model()
    sums = step_of(model).micro_step(MicroBatch(ROWS))
    assert [one.requires_grad for one in (sums.total, *sums.metrics.values())] == [False, False, False]


def test_the_weight_is_the_default_number_of_tokens() -> None:
    step = step_with(toy_model(), lambda found: replace(found, num_tokens=None))
    assert taken(step, cut(ROWS, [1, 3])).num_tokens == 4


def test_where_nothing_counts_figures_are_zero_and_the_optimizer_steps_all_the_same() -> None:
    """The weight decay of torchtune's usual optimizer still acts."""
    model = toy_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    policy = OptimizerStep(model, [optimizer], ranks=1, max_grad_norm=1.0)
    result = taken(step_of(model, policy=policy), [[ROWS[2]]])
    assert result == StepResult(0.0, 0.0, 10, {"mean_x": 0.0, "one": 0.0}, grad_norm=0.0)
    assert model.weight.item() == pytest.approx(W * (1 - LR * 0.1))


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_gradients_are_clipped_after_normalization_and_the_norm_is_that_before_clipping(max_norm: float) -> None:
    model = toy_model()
    result = taken(step_of(model, max_grad_norm=max_norm), [ROWS])
    assert result.grad_norm == pytest.approx(MEAN_X)
    assert model.weight.item() == pytest.approx(W - LR * min(MEAN_X, max_norm), rel=1e-5)


# ---- a request to end the run


@pytest.mark.parametrize(("own", "others", "stop"), [(False, 0, False), (False, 1, True), (True, 0, True)])
def test_every_rank_learns_of_a_request_by_the_sum_over_ranks(
    own: bool, others: int, stop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the other ranks have no rows that count."""

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        of_others = torch.zeros_like(values)
        of_others[3] = others
        return values + of_others

    monkeypatch.setattr(train_step_module, "sum_over_ranks", sum_over_ranks)
    asked = False
    step = step_of(toy_model(), stop_requested=lambda: asked)
    sums = functools.reduce(operator.add, map(step.micro_step, map(MicroBatch, cut(ROWS, [2]))))
    asked = own  # after the micro-steps
    result = finished(step, sums)
    assert result.stop is stop
    assert (result.loss, result.weight, result.num_tokens) == (pytest.approx(W * MEAN_X), 4, 50)
    assert result.grad_norm is None  # without clipping
    assert result.metrics == {"mean_x": pytest.approx(MEAN_X), "one": 1.0}


# ---- batches


@pytest.mark.parametrize("kind", [tuple, dict])
def test_a_batch_of_tensors_goes_to_the_device(kind: type) -> None:
    """A tuple as for preference pairs; the meta device stands for any device other than the host."""
    model = nn.Linear(1, 1, device="meta")
    seen: list[Any] = []

    def objective(batch: Any) -> Loss:
        seen.extend(batch.values() if kind is dict else [batch[0], *batch[1], batch[2]])
        weight = torch.ones((), device="meta")
        return Loss(model(torch.zeros(5, 1, device="meta")).sum(), weight, weight)

    def to_batch(rows: Sequence[Row]) -> Any:
        xs = torch.tensor([[row["x"]] for row in rows])
        return {"x": xs, "y": 2 * xs} if kind is dict else (xs, [2 * xs], "kept")

    step = step_of(model, objective=objective, collate=to_batch, device=torch.device("meta"))
    step.micro_step(MicroBatch(ROWS))
    assert [(one.device.type, tuple(one.shape)) for one in seen[:2]] == [("meta", (5, 1))] * 2
    assert seen[2:] == ["kept"] * (kind is tuple)


def test_a_meter_counts_the_batch_but_not_the_operations_that_make_it() -> None:
    """Collating takes an operation per row, but a forecast needs the same operations for two sizes."""
    model, meter = toy_model(), CpuMeter()
    live_bytes: list[int] = []

    def objective(batch: dict[str, torch.Tensor]) -> Loss:
        live_bytes.append(meter.live_bytes)
        weight = torch.tensor(1)
        return Loss(model(batch["x"]).sum(), weight, weight)

    def row_by_row(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack([torch.full((1,), row["x"]) for row in rows])}

    step = step_of(model, objective=objective, collate=row_by_row, meter=meter)
    with meter:
        meter.start_timeline()
        step.micro_step(MicroBatch(ROWS[:3]))
        operations = meter.stop_timeline(3).operations
    assert live_bytes == [3 * 4]
    assert any("sum" in name for name in operations)
    assert not any("full" in name or "stack" in name or "cat" in name for name in operations)


# ---- micro-steps of a small batch, whose gradient is measured


def test_the_last_micro_step_of_the_small_batch_measures_the_gradient_so_far() -> None:
    """The gradient includes this micro-step's backward, and nothing after it."""
    step = step_of(toy_model(), max_grad_norm=1.0)
    first = step.micro_step(MicroBatch(ROWS[:1], is_small=True))
    last = step.micro_step(MicroBatch(ROWS[1:4], is_small=True, ends_small=True))
    assert first.small_batch is not None
    assert first.small_batch.tolist() == [0.0, 1.0]
    assert last.small_batch is not None
    assert last.small_batch.tolist() == [(1.0 + 2 + 9) ** 2, 2.0]
    assert last.small_batch.dtype == torch.float64
    result = finished(step, first + last + step.micro_step(MicroBatch(ROWS[4:])))
    assert result.measured == (144.0, 3.0, (1.0 + 2 + 9 + 4) ** 2)  # of sums, before they are normalized and clipped
    assert result.grad_norm == pytest.approx(MEAN_X)
    assert result.metrics == {"mean_x": pytest.approx(MEAN_X), "one": 1.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_norm_is_that_of_all_existing_gradients_in_float64(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(dtype)
    model[0].bias.requires_grad_(False)  # it has no gradient
    model(torch.randn(4, 3, dtype=dtype)).square().sum().backward()
    norm_squared = own_norm_squared(model)
    expected = sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None)
    assert norm_squared.item() == pytest.approx(expected, rel=1e-6)
    assert (norm_squared.dtype, tuple(norm_squared.shape)) == (torch.float64, ())


def test_the_square_of_a_large_float32_norm_does_not_overflow() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.full((1, 1), 2.0**100)
    assert own_norm_squared(model).item() == 2.0**200


# ---- when optimizers step


def test_all_optimizers_step() -> None:
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizers = [torch.optim.SGD([model.weight], lr=LR), torch.optim.SGD([model.bias], lr=0.25)]
    policy = OptimizerStep(model, optimizers, ranks=1, max_grad_norm=None)
    taken(step_of(model, policy=policy), cut(ROWS, [2]))
    assert (model.weight.item(), model.bias.item()) == (pytest.approx(-LR * MEAN_X), pytest.approx(-0.25))
    assert (model.weight.grad, model.bias.grad) == (None, None)


def in_backward(model: nn.Module, *, normalizes: bool, ranks: int = 1) -> OptimizerInBackward:
    optimizers: Any = {parameter: torch.optim.SGD([parameter], lr=LR) for parameter in model.parameters()}
    register_optim_in_bwd_hooks(model, optimizers)
    wrapper = create_optim_in_bwd_wrapper(model, optimizers)
    return OptimizerInBackward(model, wrapper, ranks=ranks, normalizes=normalizes)


@pytest.mark.parametrize("within_backward", [True, False])
def test_the_division_by_ranks_of_fsdp2_is_undone(within_backward: bool) -> None:
    model = toy_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    policy = OptimizerStep(model, [optimizer], ranks=4, max_grad_norm=None)
    taken(step_of(model, policy=in_backward(model, normalizes=True, ranks=4) if within_backward else policy), [ROWS])
    assert model.weight.item() == pytest.approx(W - LR * 4 * MEAN_X)


@pytest.mark.parametrize("normalizes", [True, False], ids=["normalized", "as torchtune's single-device recipe"])
def test_optimizers_step_within_backward_and_only_there(normalizes: bool) -> None:
    model = toy_model()
    policy = in_backward(model, normalizes=normalizes)
    step = step_of(model, policy=policy)
    sums = step.micro_step(MicroBatch(ROWS))
    expected = W - LR * (MEAN_X if normalizes else 4 * MEAN_X)
    assert model.weight.item() == pytest.approx(expected)
    result = finished(step, sums)
    assert model.weight.item() == pytest.approx(expected)
    assert (result.loss, result.weight, result.grad_norm) == (pytest.approx(W * MEAN_X), 4, None)
    assert model.weight.grad is None


# ---- supervised finetuning

VOCAB, IGNORED = 7, -100


class ToyDecoder(nn.Module):
    """Returns the logits of each token, whole or in chunks, as torchtune's models do."""

    def __init__(self, chunks: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 4)
        self.output = nn.Linear(4, VOCAB)
        self.chunks = chunks
        self.given: list[dict[str, torch.Tensor]] = []

    def forward(self, tokens: torch.Tensor, **more: torch.Tensor) -> Any:
        self.given.append(more)
        hidden = self.embedding(tokens)  # [B, S, 4]
        if self.chunks is None:
            return self.output(hidden)
        return [self.output(chunk) for chunk in hidden.chunk(self.chunks, dim=1)]


TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 0, 0]])
LABELS = torch.tensor([[1, 2, 3, 4, 5, 6], [IGNORED, 5, 4, 3, IGNORED, IGNORED]])


def next_token(chunks: int | None, *, weight_depends_on_cut: bool, activations: Any = None) -> NextToken:
    loss_fn: Any = CEWithChunkedOutputLoss(chunks) if chunks else nn.CrossEntropyLoss(ignore_index=IGNORED)
    activations = activations or contextlib.nullcontext()
    return NextToken(ToyDecoder(chunks), loss_fn, activations, weight_depends_on_cut=weight_depends_on_cut)


@pytest.mark.parametrize("chunks", [None, 3], ids=["whole", "in chunks"])
@pytest.mark.parametrize(("as_torchtune", "num_tokens"), [(True, 9), (False, 8)])
def test_the_loss_is_that_of_each_token_given_those_before_it(
    chunks: int | None, as_torchtune: bool, num_tokens: int
) -> None:
    objective = next_token(chunks, weight_depends_on_cut=as_torchtune)
    found = objective({"tokens": TOKENS, "labels": LABELS})
    logits = ToyDecoder(None)(TOKENS)[:, :-1]
    mean = F.cross_entropy(logits.reshape(-1, VOCAB), LABELS[:, 1:].reshape(-1), ignore_index=IGNORED)
    assert (found.weight.item(), found.num_tokens, found.metrics) == (num_tokens, None, {})  # the weight counts tokens
    torch.testing.assert_close(found.total, mean * num_tokens)


class MaskedMean(nn.Module):
    """A user's own loss, which divides by the number of unmasked labels, also if there is none."""

    ignore_index = IGNORED

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = (labels != self.ignore_index).float()
        losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        return (losses * mask).sum() / mask.sum()


@pytest.mark.parametrize("weight_depends_on_cut", [True, False])
@pytest.mark.parametrize("labels", [[IGNORED] * 6, [3] + [IGNORED] * 5], ids=["none", "the first only"])
def test_rows_that_predict_nothing_have_no_gradient_for_any_loss(
    weight_depends_on_cut: bool, labels: list[int]
) -> None:
    """0 * NaN would make the whole step NaN. The backward pass still runs, for the collectives of FSDP2."""
    model = ToyDecoder(None)
    options: dict[str, Any] = {"weight_depends_on_cut": weight_depends_on_cut}
    objective = NextToken(model, MaskedMean(), contextlib.nullcontext(), **options)
    found = objective({"tokens": TOKENS[:1], "labels": torch.tensor([labels])})
    assert (found.total.item(), found.weight.item()) == (0, 0)
    found.total.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert gradients
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_the_model_gets_all_of_the_batch_except_the_labels() -> None:
    model, loss_fn = ToyDecoder(None), nn.CrossEntropyLoss(ignore_index=IGNORED)
    objective = NextToken(model, loss_fn, contextlib.nullcontext(), weight_depends_on_cut=True)
    positions, mask = torch.arange(6), torch.ones(2, 6, 6)
    objective({"tokens": TOKENS, "labels": LABELS, "input_pos": positions, "mask": mask})
    assert model.given == [{"input_pos": positions, "mask": mask}]


class Once(contextlib.AbstractContextManager[None]):
    """A context that cannot be used again after an error, as that of torchtune's activation offloading."""

    failed = False

    def __enter__(self) -> None:
        assert not self.failed

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.failed = kind is not None


def test_a_context_that_a_failed_step_leaves_unusable_is_renewed() -> None:
    activations = Activations(Once())
    with activations:
        pass
    with pytest.raises(MemoryError), activations:
        raise MemoryError
    with pytest.raises(AssertionError), activations:
        pass
    activations.renew()
    with activations:
        pass

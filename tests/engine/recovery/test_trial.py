"""Before training, a step is tried: what must not be cut into micro-batches, or must not run again, is refused."""

import copy
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from tests.support.faults import same_bits
from tests.support.layers import RunningMean
from tests.support.ranks import run_on_ranks
from torchtune_adaptive import CannotRecoverError, InputError, RecoverableStep
from torchtune_adaptive.engine.recovery.fixed_randomness import FixedRandomness
from torchtune_adaptive.errors import CannotCutError
from torchtune_adaptive.testing import out_of_memory, wrap_micro_steps

WIDTH = 12
ROWS = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def net(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 24), *layers, nn.Tanh(), nn.Linear(24, 6))


def step_of(model: Any, loss: Loss, **options: Any) -> RecoverableStep[Any]:
    def micro_step(rows: torch.Tensor) -> torch.Tensor:
        total = loss(model, rows)
        total.backward()
        return total.detach()

    options = {"micro_batch_size": 4} | options
    return RecoverableStep(model, micro_step, **options)


def total_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().sum()


def weighted(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """A mean of which the first of ``ROWS`` is no part: nan alone, as for a sample without labels."""
    counts = (rows[:, 0] != ROWS[0, 0]).float()
    return (model(rows).square().sum(1) * counts).sum() / counts.sum()


class Shifted(RunningMean):
    """Subtracts the mean of earlier batches."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - self.mean.clone() + 0 * super().forward(rows)


def contrastive(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    values = F.normalize(model(rows))
    return F.cross_entropy(values @ values.T * 5, torch.arange(len(rows)), reduction="sum")


def standardised(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """As advantages within a micro-step: nan for one sample."""
    values = rows[:, 0] - rows[:, 0].mean()
    variance = values.square().sum() / (len(rows) - 1)
    return (model(rows).square().sum(1) * values / variance.sqrt()).sum()


def of_equal_classes(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """As a supervised contrastive loss: nothing for two samples of two classes."""
    values, own = F.normalize(model(rows)), torch.eye(len(rows), dtype=torch.bool)
    classes = torch.tensor([ROWS.eq(row).all(1).nonzero().item() % 2 for row in rows])
    alike = classes[:, None].eq(classes) & ~own
    return -((values @ values.T).masked_fill(own, -9).log_softmax(1) * alike).sum()


def forgetful(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    return total_loss(model, rows)


# ---- what adds up


def masked(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows).square().sum(1) * (rows[:, 0] != ROWS[0, 0])).sum()


def noisy(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """As of a diffusion model: noise and a time for each sample."""
    times = torch.randint(1, 100, (len(rows), 1)) / 100
    noise = torch.randn_like(rows)
    return (model(rows * times + noise * (1 - times)) - noise[:, :6]).square().sum()


def chosen_by_python(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().sum() * (random.random() + float(np.random.rand()))


def several_draws(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """As of an autoencoder with several draws of noise for each sample [draws, samples, WIDTH]."""
    return model(rows + torch.randn(5, *rows.shape)).square().logsumexp(0).sum()


def in_bf16(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(rows).float().square().sum()


@pytest.mark.parametrize(
    ("loss", "layers"),
    [
        (total_loss, ()),
        (masked, (nn.Dropout(0.5),)),
        (noisy, (nn.AlphaDropout(0.3), nn.LayerNorm(24))),
        (chosen_by_python, (Shifted(24),)),
        (in_bf16, (nn.BatchNorm1d(24).eval(),)),
        (several_draws, ()),
    ],
    ids=["plain", "dropout", "alpha dropout", "running mean", "frozen batch norm", "noise in front of the samples"],
)
def test_a_sum_over_samples_may_be_cut(loss: Loss, layers: tuple[nn.Module, ...]) -> None:
    step = step_of(net(*layers), loss)
    step.dry_run(ROWS)
    assert step.recovers
    assert not step._preparation._trials_left


def test_modes_and_random_states_are_as_before() -> None:
    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model.eval()(rows).square().sum() * (1 + torch.rand(()))

    model = net(nn.Dropout(0.5))
    modes, states = [one.training for one in model.modules()], (torch.get_rng_state(), random.getstate())
    step_of(model, loss).dry_run(ROWS)
    assert [one.training for one in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_the_first_two_samples_that_count_are_compared() -> None:
    ignored = ROWS[:6, 0].tolist()

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        counts = torch.tensor([row[0].item() not in ignored for row in rows])
        return (model(rows).square().sum(1) * counts).sum() / counts.sum()

    with pytest.raises(CannotCutError, match="the loss is a mean over the samples"):
        step_of(net(), loss).dry_run(ROWS)


@pytest.mark.parametrize("first", [ROWS, ROWS[:1]], ids=["no loss", "one sample"])
def test_a_step_in_which_no_two_samples_count_leaves_the_trial_to_the_next_step(
    first: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    is_on = len(first) == 1

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).square().mean() * is_on

    step = step_of(net(), loss)
    step(first)
    assert step.recovers
    assert ("It is not known whether samples may be cut" in caplog.text) is (len(first) > 1)  # as they are cut
    step._loop.model.zero_grad()
    is_on = True
    with pytest.raises(CannotCutError, match="the loss is a mean"):
        step(ROWS)


@pytest.mark.parametrize("is_mean", [False, True], ids=["sum", "mean"])
def test_gradients_that_a_scaler_lets_overflow_leave_the_trial_to_a_later_step(is_mean: bool) -> None:
    """With the first scale, of each sample alone they are finite."""
    scale = 2.0**16

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            squares = model(rows).float().square().sum(1)
        return (squares.mean() * 2 if is_mean else squares.sum()) * scale

    step = step_of(net(), loss)
    step(ROWS)
    assert step.recovers
    step._loop.model.zero_grad()
    scale /= 8
    with pytest.raises(CannotCutError, match="the loss is a mean") if is_mean else nullcontext():
        step(ROWS)


# ---- what mixes samples


MIXES = "the loss or a layer mixes the samples of a micro-batch: "
MIXING: dict[str, tuple[Callable[[], nn.Module], Loss, str]] = {
    "a mean": (net, lambda model, rows: model(rows).square().mean(), "the loss is a mean over the samples"),
    "a mean without the first sample": (net, weighted, "the loss is a mean over the samples"),
    "batch norm": (lambda: net(nn.BatchNorm1d(24)), total_loss, r"the layer `1` \(BatchNorm1d\) computes with stat"),
    "batch norm without running statistics": (
        lambda: net(nn.BatchNorm1d(24, track_running_stats=False)).eval(),
        total_loss,
        r"the layer `1` \(BatchNorm1d\) computes with stat",
    ),
    "in-batch negatives": (net, contrastive, MIXES + "two have other gradients together than each alone"),
    "a penalty": (net, lambda model, rows: total_loss(model, rows) + 9 * model[0].weight.square().sum(), MIXES),
    "a mean over labels": (
        net,
        lambda model, rows: (model(rows).square().sum(1) * (1 + rows[:, 1] ** 2)).sum() / (1 + rows[:, 1] ** 2).sum(),
        MIXES + "the gradients of two together differ",
    ),
    "statistics that one sample has not": (net, standardised, MIXES + "two have gradients together, and none that"),
    "pairs of a class": (net, of_equal_classes, MIXES + "the gradients of two together differ"),
    "gradients that are dropped": (net, forgetful, "a micro-step drops the gradients of the one before"),
}


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_are_mixed_are_not_cut(name: str) -> None:
    make, loss, sentence = MIXING[name]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    before, modes = [one.clone() for one in model.state_dict().values()], [one.training for one in model.modules()]
    step = step_of(model, loss, optimizer=optimizer)
    sentence = "must not be cut into micro-batches: .*" + sentence
    for run in (step.dry_run, step):
        with pytest.raises(CannotCutError, match=sentence):
            run(ROWS)
    assert same_bits(before, list(model.state_dict().values()))
    assert modes == [one.training for one in model.modules()]
    assert not optimizer.state
    assert all(one.grad is None for one in model.parameters())


@pytest.mark.parametrize("name", ["a mean", "batch norm", "in-batch negatives"])
def test_samples_that_are_mixed_train_as_one_micro_batch_without_recovery(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, loss, sentence = MIXING[name]
    model, own = make(), make()
    step = step_of(model, loss, micro_batch_size=8)
    torch.manual_seed(3)
    found = step(ROWS)
    torch.manual_seed(3)
    expected = loss(own, ROWS)
    expected.backward()
    assert not step.recovers
    assert torch.equal(found, expected.detach())
    gradients = [[one.grad for one in each.parameters()] for each in (model, own)]
    assert same_bits(*gradients)  # pyright: ignore[reportArgumentType]
    assert "An out-of-memory error will end the run" in caplog.text
    wrap_micro_steps(step, lambda number, run: out_of_memory())
    with pytest.raises(torch.OutOfMemoryError):
        step(ROWS)
    with pytest.raises(CannotCutError, match=sentence):
        step(torch.cat([ROWS, ROWS]))


def test_a_step_that_the_caller_has_disabled_is_cut_as_asked_for() -> None:
    step = step_of(net(nn.BatchNorm1d(24)), total_loss)
    step.disable()
    step(ROWS)
    assert step._loop.model[1].num_batches_tracked == 2  # pyright: ignore[reportIndexIssue]


def test_a_batch_norm_that_is_unfrozen_later_is_noticed() -> None:
    model = net(nn.BatchNorm1d(24).eval())
    step = step_of(model, total_loss)
    step(ROWS)
    model.zero_grad()
    model.train()
    with pytest.raises(CannotCutError, match="BatchNorm1d"):
        step(ROWS)


# ---- what cannot be told


def permuted(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Random numbers that cannot be fixed."""
    return (model(rows) * torch.stack([torch.randperm(6) for _ in rows])).square().sum()


def test_random_numbers_that_cannot_be_fixed_are_not_taken_for_mixed_samples(caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(net(), permuted)
    step(ROWS)
    assert step.recovers
    assert "draws random numbers that cannot be fixed" in caplog.text


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_rows_that_are_changed_at_random_are_not_taken_for_mixed_samples(draw: Callable[[], float]) -> None:
    """Also where the first row has the same change by chance with other seeds."""

    def flipped(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        flips = torch.tensor([draw() < 0.5 for _ in rows])
        return total_loss(model, torch.where(flips[:, None], rows.flip(1), rows))

    for seed in range(12):
        random.seed(seed)
        np.random.seed(seed)
        step = step_of(net(), flipped)
        step.dry_run(ROWS)
        assert step.recovers


def with_seed_of_its_own(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """As the code of Inductor draws it, for kernels whose random numbers no operation shows."""
    seed = torch.randint(-(2**63), 2**63 - 1, ()) % 1009
    kept = torch.arange(1, 1 + 6 * len(rows)) * seed % 97 / 97
    return (model(rows) * kept.view(-1, 6)).square().sum()


def test_kernels_that_draw_random_numbers_are_not_taken_for_mixed_samples(caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(net(), with_seed_of_its_own)
    step(ROWS)
    assert "draws random numbers that cannot be fixed" in caplog.text


def test_dropout_in_compiled_code_is_not_taken_for_mixed_samples() -> None:
    model = net(nn.Dropout(0.5))
    model.compile(backend="aot_eager")
    step = step_of(model, total_loss)
    step.dry_run(ROWS)
    assert step.recovers


def test_parameters_that_change_unseen_are_noticed() -> None:
    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        weight: Any = model[0].weight  # pyright: ignore[reportIndexIssue]
        weight.detach().numpy()[0, 0] += 1
        return total_loss(model, rows)

    with pytest.raises(InputError, match=r"has changed the parameter `0\.weight`: load the model again"):
        step_of(net(), loss, micro_batch_size=1).dry_run(ROWS)


def test_a_frozen_parameter_that_gets_other_values_is_noticed() -> None:
    """As of MoCo's key encoder, an average of the query encoder."""

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        weight: Any = model[0].weight  # pyright: ignore[reportIndexIssue]
        weight.data = weight.data * 0.9
        return total_loss(model, rows)

    model = net()
    model[0].requires_grad_(False)
    with pytest.raises(InputError, match=r"has changed the parameter `0\.weight`: load the model again"):
        step_of(model, loss).dry_run(ROWS)


# ---- what must not happen in a micro-step


def hooked(hook: Callable[[Any], object]) -> Callable[[nn.Module], Loss]:
    """A loss of a model whose backward pass calls ``hook`` with each parameter that has got its gradient."""

    def harm(model: nn.Module) -> Loss:
        for parameter in model.parameters():
            if hook is add_to_main_grad:
                parameter.main_grad = torch.zeros_like(parameter)  # pyright: ignore[reportAttributeAccessIssue]
            parameter.register_post_accumulate_grad_hook(hook)
        return total_loss

    return harm


def update(parameter: Any) -> None:
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def add_to_main_grad(parameter: Any) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def keep_as_main_grad(parameter: Any) -> None:
    parameter.main_grad = parameter.grad.double()


def take(parameter: Any) -> None:
    parameter.grad = None


def steps(model: nn.Module) -> Loss:
    """A whole train step, given as a micro-step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        total_loss(model, rows).backward()
        optimizer.step()
        return total_loss(model, rows)

    return loss


def builds(model: nn.Module) -> Loss:
    """A layer for the shape of the first input, whose random numbers would be those of the trial."""

    def loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
        if not hasattr(model[1], "shift"):
            model[1].shift = Shifted(rows.shape[1])
        return total_loss(model, model[1].shift(rows))

    return loss


def no_gradient(model: nn.Module) -> Loss:
    return lambda model, rows: torch.zeros((), requires_grad=True) * 2


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (hooked(update), r"a micro-step writes to the parameter `2\.\w+`"),
        (hooked(add_to_main_grad), r"a micro-step writes to `main_grad` of the parameter `2\.\w+`"),
        (hooked(keep_as_main_grad), r"a micro-step puts tensors into attributes of the parameter"),
        (hooked(take), r"a hook takes the gradient of `2\.\w+` away in the backward pass"),
        (steps, "the optimizer SGD steps within a micro-step"),
        (builds, r"a micro-step adds `1\.shift\.\w+` to the model: build it before, by one forward pass"),
        (no_gradient, r"a micro-step leaves no gradient in `\.grad` of any parameter"),
    ],
    ids=["update", "main_grad", "new main_grad", "taken", "steps", "builds", "no gradient"],
)
def test_a_micro_step_that_acts_on_more_than_gradients_is_refused_before_it_does(
    harm: Callable[[nn.Module], Loss], sentence: str
) -> None:
    model = net()
    loss = harm(model)
    before = [one.clone() for one in model.parameters()]
    step = step_of(model, loss)
    with pytest.raises(CannotRecoverError, match=sentence):
        step(ROWS)
    assert same_bits(before, [one.detach() for one in model.parameters()])
    assert all(one.grad is None for one in model.parameters())
    if "writes to `main_grad`" in sentence:
        assert not any(one.main_grad.any() for one in model.parameters())  # pyright: ignore


class Box:
    """An object of a class that is not restored."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.is_busy = False

    def take(self) -> Any:
        """The sum of all losses, which are then gone."""
        total = sum(self.losses)
        self.losses.clear()
        return total


class Noting(nn.Module):
    """Puts a small auxiliary loss into a box."""

    def __init__(self, box: Box) -> None:
        super().__init__()
        self.box = box

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.box.losses.append(rows.square().sum() / 1000)
        return rows


class Entering(nn.Module):
    """Refuses a second forward pass before the end of the first."""

    def __init__(self, box: Box, *, is_last: bool) -> None:
        super().__init__()
        self.box, self.is_last = box, is_last

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.box.is_busy is not self.is_last:
            raise RuntimeError("entered twice")
        self.box.is_busy = not self.is_last
        return rows


def taken_at_the_end(box: Box, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return total_loss(model, rows) + box.take()


def taken_at_the_beginning(box: Box, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    box.losses.clear()
    return taken_at_the_end(box, model, rows)


def test_what_a_micro_step_that_ends_halfway_leaves_for_the_next_one_is_refused() -> None:
    box = Box()
    model = net(Noting(box), nn.Dropout(0.3))
    with pytest.raises(CannotRecoverError, match="a micro-step that ends halfway changes the next one: it leaves"):
        step_of(model, partial(taken_at_the_end, box)).dry_run(ROWS)
    step_of(model, partial(taken_at_the_beginning, box)).dry_run(ROWS)


def test_what_it_leaves_for_all_that_follow_is_refused_unless_it_is_removed_after_an_error_too() -> None:
    """As a hook."""
    model = net()

    def loss_of(rows: torch.Tensor, *, is_removed: bool) -> torch.Tensor:
        hook = model[0].weight.register_hook(lambda gradient: 2 * gradient)  # pyright: ignore
        with ExitStack() as after_errors:
            after_errors.callback(hook.remove if is_removed else lambda: None)
            loss = total_loss(model, rows)
            loss.backward()
        hook.remove()
        return loss.detach()

    RecoverableStep(model, partial(loss_of, is_removed=True), micro_batch_size=4).dry_run(ROWS)
    with pytest.raises(CannotRecoverError, match="a micro-step that ends halfway changes the next one: it leaves"):
        RecoverableStep(model, partial(loss_of, is_removed=False), micro_batch_size=4).dry_run(ROWS)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.randn(24), "draws random numbers"),
        (lambda: np.random.default_rng(0), "makes a random generator"),
    ],
)
def test_what_only_the_first_micro_step_makes_is_refused_where_it_would_stay(
    make: Callable[[], Any], what: str
) -> None:
    """Its random numbers were fixed, and its generator has moved on."""
    kept: list[Any] = []

    def at_first(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(make())
        offset = torch.as_tensor(kept[0] if isinstance(kept[0], torch.Tensor) else kept[0].random(24))
        return total_loss(model, rows + offset[: rows.shape[1]].to(rows.dtype))

    with pytest.raises(CannotRecoverError, match=f"the first micro-step {what}, which it keeps outside of the model"):
        step_of(net(), at_first)(ROWS)
    step_of(net(), at_first)(ROWS)  # they are there


def test_a_generator_that_each_micro_step_makes_is_no_harm() -> None:
    holder = SimpleNamespace()

    def seeded(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        holder.generator = torch.Generator().manual_seed(3)
        return total_loss(model, rows + torch.randn(rows.shape[1], generator=holder.generator))

    step = step_of(net(), seeded)
    step(ROWS)
    assert step.recovers


def test_a_micro_step_that_skips_a_batch_without_memory_is_refused_but_not_one_that_tries_again() -> None:
    model = net()

    def loss_of(rows: torch.Tensor, *, tries: int) -> torch.Tensor:
        for _ in range(tries):
            try:
                loss = total_loss(model, rows)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
            except torch.OutOfMemoryError:
                continue
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.backward(gradient)
            return loss.detach()
        return torch.zeros(())

    with pytest.raises(CannotRecoverError, match="catches out-of-memory errors itself"):
        RecoverableStep(model, partial(loss_of, tries=1), micro_batch_size=4).dry_run(ROWS)
    RecoverableStep(model, partial(loss_of, tries=2), micro_batch_size=4).dry_run(ROWS)


def test_a_micro_step_that_fails_after_one_that_has_ended_halfway_is_refused_with_its_error() -> None:
    box = Box()
    model = nn.Sequential(Entering(box, is_last=False), net(), Entering(box, is_last=True))
    with pytest.raises(
        CannotRecoverError, match=r"the next one, which fails \(RuntimeError: entered twice\): it leaves"
    ):
        step_of(model, total_loss).dry_run(ROWS)


def test_gradients_that_change_from_call_to_call_are_not_taken_for_something_left_behind() -> None:
    calls = iter(range(1000))
    step_of(net(), lambda model, rows: total_loss(model, rows) * (1 + next(calls) / 1e5)).dry_run(ROWS)


def test_memory_that_a_layer_has_given_up_is_no_parameter() -> None:
    """bitsandbytes casts a bias when it is first used: a tensor made later may get the memory from before."""
    model = net()
    model.bias = bias = nn.Parameter(torch.ones(64), requires_grad=False)

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        bias.data = bias.data.double()
        made = [torch.empty(64).fill_(1) for _ in range(100)]
        return total_loss(model, rows) + 0 * torch.stack(made).sum()

    step_of(model, loss).dry_run(ROWS)


def test_hooks_that_keep_gradients_and_parameters_without_gradients_are_no_harm() -> None:
    model = net()
    model.append(nn.Linear(2, 2))  # not used
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    step = step_of(model, lambda model, rows: model[:3](rows).square().sum())
    step.dry_run(ROWS)
    assert step.recovers
    assert set(seen) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_parametrization_that_comes_and_goes_is_no_harm() -> None:
    """As adapters of PEFT for the parameters of experts: torch sets the parameter to itself."""
    model = net()

    def loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(model[0], "weight", nn.Dropout(0.0))
        try:
            return total_loss(model, rows)
        finally:
            parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)

    step = step_of(model, loss)
    step.dry_run(ROWS)
    assert step.recovers


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_gradients_may_be_sparse_or_complex(kind: str) -> None:
    table: nn.Module = nn.Embedding(7, 4, sparse=True)
    if kind == "complex":
        table = nn.Linear(1, 4, bias=False, dtype=torch.cfloat)

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        values = model(rows if kind == "sparse" else rows[..., None].to(torch.cfloat))
        return values.abs().square().sum()

    samples = torch.arange(12).reshape(4, 3) % 7
    step_of(table, loss).dry_run(samples)
    with pytest.raises(CannotCutError, match="a mean over the samples"):
        step_of(table, lambda model, rows: loss(model, rows) / len(rows)).dry_run(samples)


# ---- batches that are changed in place


def normalise(rows: torch.Tensor) -> torch.Tensor:
    return rows.sub_(1).div_(2)


def pop(samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([sample.pop("row") for sample in samples])


def double(samples: list[dict[str, list[float]]]) -> torch.Tensor:
    for sample in samples:
        sample["row"][:] = [2 * one for one in sample["row"]]
    return torch.tensor([sample["row"] for sample in samples])


def through_numpy(rows: Any) -> torch.Tensor:
    rows -= 1
    return torch.from_numpy(rows).float()


@pytest.mark.parametrize(
    ("samples", "change"),
    [
        (lambda: ROWS.clone(), normalise),
        (lambda: [{"row": row} for row in ROWS.clone()], pop),
        (lambda: [{"row": row.tolist()} for row in ROWS], double),
        (lambda: ROWS.double().numpy(), through_numpy),
    ],
    ids=["tensor", "list of dicts", "lists", "array"],
)
@pytest.mark.parametrize("from_the_first_step", [True, False])
def test_a_batch_that_is_changed_in_place_is_given_as_a_copy(
    samples: Callable[[], Any], change: Callable[[Any], torch.Tensor], from_the_first_step: bool
) -> None:
    """In later steps only: a change of tensors ends the run, others are not seen, and so have copies always."""
    given, is_tried = samples(), True
    if not from_the_first_step and isinstance(given, torch.Tensor):
        pytest.skip("see the next test")

    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        return total_loss(model, change(rows if from_the_first_step or not is_tried else copy.deepcopy(rows)))

    own, model = net(), net()
    for part in (slice(0, 4), slice(4, 8)):
        loss(own, samples()[part]).backward()
    step = step_of(model, loss, on_event=lambda event: None)
    step.dry_run(given)
    is_tried = False
    wrap_micro_steps(step, lambda number, run: (run(), number == 1 and out_of_memory())[0])
    step(given)
    assert step.retries == 1
    for one, other in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    if isinstance(given, list):
        assert str(given) == str(samples())
    else:
        assert np.array_equal(np.asarray(given), np.asarray(samples()))


def test_a_change_that_the_trial_has_not_seen_is_never_run_again() -> None:
    is_on = False

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return total_loss(model, rows.mul_(2) if is_on else rows)

    step = step_of(net(), loss)
    step.dry_run(ROWS)
    is_on = True
    wrap_micro_steps(step, lambda number, run: (run(), number == 1 and out_of_memory())[0])
    with pytest.raises(InputError, match="`micro_step` has changed its micro-batch in place, but had not before"):
        step(ROWS.clone())


def test_batches_are_not_copied_without_a_change() -> None:
    rows, seen = ROWS.clone(), list[int]()

    def loss(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
        seen.append(part.untyped_storage().data_ptr())
        return total_loss(model, part)

    step = step_of(net(), loss)
    step(rows)
    assert seen[-2:] == [rows.untyped_storage().data_ptr()] * 2


# ---- results


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (lambda loss, out: {"task": "sst2"}, "must have a sum.*'sst2'"),
        (lambda loss, out: {"loss": loss, "logits": out}, r"together have a tensor of shape \(2, 6\)"),
        (lambda loss, out: (loss / len(out),), "^Results of micro-steps must add up, but two samples"),
        (lambda loss, out: 3, "two samples together have 3, and the sum of each alone is 6"),
    ],
    ids=["text", "logits", "mean", "constant"],
)
def test_results_that_do_not_add_up_are_refused_before_training(result: Callable[..., Any], sentence: str) -> None:
    model = net()

    def micro_step(rows: torch.Tensor) -> Any:
        out = model(rows)
        loss = out.square().sum()
        loss.backward()
        return result(loss.detach(), out.detach())

    with pytest.raises(InputError, match=sentence):
        RecoverableStep(model, micro_step, micro_batch_size=8)(ROWS)


def test_results_may_be_of_any_kind_that_is_a_mapping() -> None:
    def micro_step(rows: torch.Tensor) -> Any:
        total_loss(model, rows).backward()
        return Counter(samples=len(rows))

    model = net()
    total = RecoverableStep(model, micro_step, micro_batch_size=3)(ROWS)
    assert type(total) is Counter
    assert total == Counter(samples=8)


# ---- several ranks


def fails(rank: int, model: nn.Module, rows: torch.Tensor, *, most: int) -> torch.Tensor:
    """A loss that fails on the second rank, on up to so many rows."""
    if rank == 1 and len(rows) <= most:
        raise RuntimeError("too few rows")
    return total_loss(model, rows)


def _sharded(model: nn.Module) -> nn.Module:
    for module in (model[0], model[-1], model):  # pyright: ignore[reportIndexIssue]
        fully_shard(module)
    return model


def _verdicts(rank: int) -> dict[str, str]:
    torch.set_num_threads(1)
    found = {}
    for name, wrap, options in (
        ("DDP", DistributedDataParallel, {}),
        ("FSDP2", _sharded, {}),
        ("FSDP2, reduced once", _sharded, {"reduce": "last"}),
    ):
        losses = {"sum": total_loss, "mixed": contrastive, "random": permuted}
        losses |= {"alone": partial(fails, dist.get_rank(), most=1), "broken": partial(fails, dist.get_rank(), most=8)}
        for case, loss in losses.items():
            model = wrap(net(nn.Dropout(0.2)))
            step = step_of(model, loss, **options)
            rows = ROWS[rank : rank + 8 - 4 * rank]  # the second rank has fewer
            try:
                step.dry_run(rows)
                found[f"{name}, {case}"] = "not tried" if step._preparation._trials_left else "recovers"
            except (CannotRecoverError, RuntimeError) as error:
                found[f"{name}, {case}"] = str(error)
            step.close()
    for name, wrap in (("DDP", DistributedDataParallel), ("FSDP2", _sharded)):
        box = Box()
        loss = taken_at_the_end if rank else taken_at_the_beginning
        step = step_of(wrap(net(Noting(box))), partial(loss, box))
        try:
            step.dry_run(ROWS)
        except CannotRecoverError as error:
            found[f"{name}, left behind"] = str(error)
        step.close()
        for case, micro_step in (("skipped", _skipping), ("added twice", _adding_twice)):
            model = wrap(net())
            step = RecoverableStep(model, partial(micro_step, model), micro_batch_size=4)
            try:
                step.dry_run(ROWS)
            except CannotRecoverError as error:
                found[f"{name}, {case}"] = str(error)
            step.close()
    model = _sharded(net())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    try:
        step_of(model, total_loss).dry_run(ROWS)
    except CannotRecoverError as error:
        found["hook"] = str(error)
    dist.barrier()
    return found


def _skipping(model: nn.Module, rows: torch.Tensor) -> None:
    with suppress(torch.OutOfMemoryError):
        total_loss(model, rows).backward()


def _adding_twice(model: nn.Module, rows: torch.Tensor) -> None:
    """Tries again, with the gradients that the first backward pass has left."""
    try:
        total_loss(model, rows).backward()
    except torch.OutOfMemoryError:
        total_loss(model, rows).backward()


def test_all_ranks_have_the_same_verdict() -> None:
    one, other = run_on_ranks(_verdicts, 2)
    broken = {name: (one.pop(name), other.pop(name)) for name in list(one) if "broken" in name}
    assert set(broken.values()) == {("another rank failed during a probe; see its own error message", "too few rows")}
    assert one == other
    assert "takes the gradient" in one.pop("hook")
    expected = {"sum": "recovers", "mixed": "mixes the samples", "random": "recovers"}
    expected["left behind"] = "a micro-step that ends halfway changes the next one"
    expected["skipped"] = expected["added twice"] = "catches out-of-memory errors itself"
    refused = {f"{kind}, {why}" for kind in ("DDP", "FSDP2") for why in ("left behind", "skipped", "added twice")}
    assert refused <= one.keys()
    expected["alone"] = "a micro-step fails on one sample alone (RuntimeError: too few rows)"
    for name, verdict in one.items():
        assert expected[name.rpartition(", ")[2]] in verdict, (name, verdict)


# ---- random numbers


def test_random_numbers_are_the_same_for_each_row_and_leave_generators_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    draws: list[Callable[[], torch.Tensor]] = [
        lambda: torch.rand(3, 4, generator=generator),
        lambda: torch.randn(3, 4),
        lambda: torch.randn_like(torch.ones(3, 4)),
        lambda: torch.randint(10, (3, 4)),
        lambda: torch.randint(5, 7, (3,)),
        lambda: torch.empty(3, 4).uniform_(2, 3),
        lambda: torch.empty(3, 4).normal_(1, 2),
        lambda: torch.normal(torch.zeros(3, 4), torch.ones(3, 4)),
        lambda: torch.bernoulli(torch.full((3, 4), 0.5)),
        lambda: torch.empty(3, 4).exponential_(),
        lambda: F.dropout(torch.ones(3, 4), 0.5),
    ]
    with FixedRandomness():
        for draw in draws:
            rows = draw()
            assert all(torch.equal(rows[0], row) for row in rows)
            assert rows.isfinite().all()
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(F.dropout(torch.ones(2), 0.0), torch.ones(2))

"""The plan of any loop: what is traced is compared with the memory of a device."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.plans import GIB
from torchtune_adaptive import InputError, plan_max_batch_size
from torchtune_adaptive.plan.any_loop import plan_of_loop
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.show.as_json import plan_json
from torchtune_adaptive.plan.trace.loop import trace_loop

WIDTH, TOKENS = 64, 128


class Attending(nn.Module):
    """One layer of attention with two heads, on samples of 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(samples).unflatten(-1, (3, 2, WIDTH // 2)).transpose(1, 3).unbind(2)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, samples: torch.Tensor) -> None:
    model(samples).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def planned(**options: Any) -> Any:
    functions = Attending, make_optimizer, train_step, lambda n: torch.zeros(n, TOKENS, WIDTH)
    usual: dict[str, Any] = {"memory": "1GiB", "device": "cpu"}
    return plan_max_batch_size(*functions, **usual | options)


def test_the_largest_batch_on_a_cpu_is_the_last_whose_traced_peak_fits() -> None:
    plan = planned(margin=0.25)
    largest = plan.decisive.largest_batch_size
    assert plan.size(largest).allocated_bytes <= 0.75 * GIB < plan.size(largest + 1).allocated_bytes
    assert (plan.decisive.safe_batch_size, plan.decisive.used.batch_size) == (largest, largest)
    weights = 4 * (WIDTH + 1) * 3 * WIDTH
    assert plan.decisive.used.kinds["parameters"] == weights
    assert plan.step.num_parameters == weights // 4
    assert list(plan.decisive.used.phases) == ["forward", "backward", "optimizer"]


def test_a_gpu_has_its_own_overhead_with_nccl_if_there_are_several_ranks() -> None:
    alone, two = (planned(device="cuda", memory="H100", ranks=ranks, batch_sizes=[3]) for ranks in (1, 2))
    card = Card.named("H100")
    assert alone.device.overhead == card.overhead(1, has_group=False)
    assert two.device.overhead == card.overhead(2)
    (size,) = alone.decisive.asked
    assert size.process_bytes == size.reserved_bytes + alone.device.outside_bytes


def test_the_first_step_makes_the_state_of_the_optimizer_amid_activations() -> None:
    (step,) = planned(device="cuda", memory="24GiB").step.lengths
    assert not step.state_exists


def test_a_setting_of_the_allocator_that_the_plan_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    assert "\nReserved bytes are those without max_split_size_mb:128, " in str(planned(device="cuda", memory="24GiB"))


def compiled() -> Any:
    return torch.compile(Attending(), backend="eager")


def compiled_in_place() -> nn.Module:
    model = Attending()
    model.inner.compile(backend="eager")
    return model


@pytest.mark.parametrize(("build_model", "device"), [(compiled, "cuda"), (compiled_in_place, "cpu")])
def test_a_compiled_model_is_planned_as_eager_code_and_the_plan_says_so(build_model: Any, device: Any) -> None:
    functions = make_optimizer, train_step, lambda n: torch.zeros(n, TOKENS, WIDTH)
    plan = plan_max_batch_size(build_model, *functions, memory="24GiB", device=device)
    assert plan.step.lengths == planned(memory="24GiB", device=device).step.lengths
    assert plan.title == "Attending"
    assert plan.assumptions == "Planned without `torch.compile`, as eager code."


def test_a_compiled_function_is_planned_as_eager_code() -> None:
    @torch.compile(backend="eager")
    def loss_of(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
        return model(samples).sum()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, samples: torch.Tensor) -> None:
        loss_of(model, samples).backward()
        optimizer.step()
        optimizer.zero_grad()

    make_batch = lambda n: torch.zeros(n, TOKENS, WIDTH)  # noqa: E731
    plan = plan_max_batch_size(Attending, make_optimizer, step, make_batch, memory="24GiB")
    assert plan.step.lengths == planned(memory="24GiB", device="cuda").step.lengths


def test_a_plan_prints_as_tables_of_samples_and_has_a_json_form() -> None:
    plan = planned(batch_sizes=[1, 2], title="mine", assumptions="Assumed: nothing.")
    first, second, third, *_ = str(plan).splitlines()
    assert first == "mine: 0.01 M parameters"
    assert second.startswith(f"{plan.decisive.largest_batch_size:,} samples fit, with ")
    assert (
        third
        == f"At most {plan.decisive.largest_batch_size:,} samples fit; {plan.decisive.safe_batch_size:,} are safe."
    )
    assert "\nAssumed: nothing.\n" in str(plan)
    assert "tokens per row" not in str(plan)
    assert "Host memory" not in str(plan)
    assert plan_json(plan)["host"] is None


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2, WIDTH, WIDTH))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([8, len(samples)], dtype=torch.int32)
        product: Any = getattr(torch, "_grouped_mm")  # noqa: B009 - it is not public
        return product(samples, self.weights.to(samples.dtype), offs=ends).tanh()


def test_experts_that_torch_cannot_trace_are_refused_with_the_type_that_it_can(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def plan(dtype: torch.dtype) -> Any:
        functions = Experts, make_optimizer, train_step, lambda n: torch.zeros(16 * n, WIDTH, dtype=dtype)
        return plan_max_batch_size(*functions, memory="1GiB")

    assert plan(torch.bfloat16).fits
    with pytest.raises(InputError) as caught:
        plan(torch.float32)
    assert "; torch traces products of experts in bfloat16 alone, as with `dtype=bfloat16`" in str(caught.value)
    assert not caplog.records


def test_an_optimizer_whose_state_grows_from_step_to_step_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        plan_max_batch_size(
            Attending, lambda model: torch.optim.LBFGS(model.parameters()), train_step, torch.zeros, memory="1GiB"
        )
    assert str(caught.value) == "`torch.optim.LBFGS` is not planned: its state grows from step to step."


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"memory": "H1000"}, "`memory` must be a size like 80GiB or one of "),
        ({"margin": 1.5}, "`margin` must be in [0, 1), but is 1.5 instead."),
        ({"batch_sizes": [0]}, "`batch_sizes` must be at least 1, but is 0 instead."),
        ({"batch_sizes": 8}, "`batch_sizes` must be a list of integers, but is 8 instead."),
        ({"device": "mps"}, "`device` must be one of cuda, cpu, but is 'mps' instead."),
        ({"ranks": 0}, "`ranks` must be at least 1, but is 0 instead."),
        ({"ranks": 10**9}, "A plan takes up to 65536 ranks, but there are 1000000000."),
    ],
)
def test_a_bad_argument_is_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        planned(**options)
    assert str(caught.value).startswith(sentence)


def test_sizes_may_come_from_any_iterable() -> None:
    assert [one.batch_size for one in planned(batch_sizes=iter([3, 4])).decisive.asked] == [3, 4]


def test_the_batch_of_a_run_may_be_given() -> None:
    traced = trace_loop(Attending, make_optimizer, train_step, lambda n: torch.zeros(n, TOKENS, WIDTH))
    card = Card.named("24GiB")
    options: dict[str, Any] = {"ranks": 1, "batch_sizes": (), "title": "", "assumptions": ""}
    largest, given = (plan_of_loop(traced, card, used=used, **options) for used in (None, 3))
    assert largest.decisive.used.batch_size == largest.decisive.largest_batch_size
    assert "`used` is the largest batch." in str(largest)
    assert given.decisive.used.batch_size == 3
    assert "`used` is the batch that a run" in str(given)
    assert given.decisive.used.usable_bytes > largest.decisive.used.usable_bytes  # no search keeps a margin free

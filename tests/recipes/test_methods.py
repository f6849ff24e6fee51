"""What each recipe can do: searches, parity with stock, growth, recovery, resume, cuts; on two ranks or one device."""

import functools
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.support.method_runs import LOGGED_OTHERWISE, ROWS_THAT_FIT, STRATEGIES, Trials, by_rank
from tests.support.recipe_runs import RECIPES, shallow_assets

# Finetuning has test files of its own, and others combine features of the remaining kinds: exhaustive tests only.
ELSEWHERE = (
    *("full", "lora", "full_single", "lora_single", "full_dpo", "lora_dpo", "lora_kd"),
    *("full_qat", "lora_qat"),
)
KINDS = [pytest.param(kind, marks=pytest.mark.exhaustive) if kind in ELSEWHERE else kind for kind in RECIPES]
MEANS = ("rewards/", "log_probs/", "logits/")  # the stock recipe takes means of means
# Many stock configs name optimizers of bitsandbytes.
EIGHT_BIT = {"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit", "lr": 1e-2}}


def _own_trials(kind: str, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    """What depends on a method's loss and rows."""
    trials = Trials(kind, tiny_dir, output_dir)
    return {"parity": trials.parity(2), "search": trials.search(STRATEGIES[:1]), "cuts": trials.cuts()}


def _exhaustive_trials(kind: str, tiny_dir: Path, output_dir: Path, more: dict[str, Any]) -> dict[str, Any]:
    trials = Trials(kind, tiny_dir, output_dir, **more)
    return {
        "parity": trials.parity(1),
        "search": trials.search(),
        "growth": trials.growth(),
        "recovery": trials.recovery(points=None),
        "resume": trials.resume(within_epoch=True),
        "resume after an epoch": trials.resume(within_epoch=False),
    }


@pytest.fixture(scope="module")
def outcomes(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a kind to the outcomes of its trials, which are run once."""
    return functools.cache(
        lambda kind: by_rank(_own_trials, kind, shallow_assets(tiny_dir), tmp_path_factory.mktemp(kind))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_parity(kind: str, outcomes: Any) -> None:
    """Losses, rates, norms and parameters equal the stock recipe's bit for bit, unless it logs other quantities."""
    check_parity(kind, [rank["parity"] for rank in outcomes(kind)], accumulation=2)


def check_parity(kind: str, ranks: list[dict[str, Any]], *, accumulation: int) -> None:
    assert all(rank["parameters equal"] for rank in ranks)
    stock_steps, steps = ranks[0]["steps"]
    assert len(stock_steps) == len(steps) == 4
    otherwise = LOGGED_OTHERWISE.get(kind, set()) | {"tokens_per_second_per_gpu"}
    last_only = kind == "lora_dpo_single" and accumulation > 1  # its metrics are those of the last micro-batch
    for stock_step, step in zip(stock_steps, steps, strict=True):
        for name in stock_step.keys() - otherwise:
            if not name.startswith(MEANS) and "_loss" not in name and not kind.startswith("lora_kd"):
                assert step[name] == stock_step[name]
            elif not last_only:
                assert step[name] == pytest.approx(stock_step[name], rel=1e-5, abs=1e-6)


@pytest.mark.exhaustive
def test_the_loss_of_lora_dpo_is_the_mean_over_ranks_where_stock_logs_their_sum(outcomes: Any) -> None:
    stock_steps, steps = outcomes("lora_dpo")[0]["parity"]["steps"]
    assert [2 * step["loss"] for step in steps] == [step["loss"] for step in stock_steps]
    assert steps[-1]["loss"] != steps[0]["loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_search(kind: str, outcomes: Any) -> None:
    """The search finds the largest number of rows that fits in a metered step, and restores all state."""
    check_search([rank["search"] for rank in outcomes(kind)], strategies=STRATEGIES[:1])


def check_search(ranks: list[dict[str, Any]], *, strategies: tuple[str, ...]) -> None:
    for rank in ranks:
        assert rank["found"] == [ROWS_THAT_FIT] * len(strategies)
        assert rank["traces"] == []
        assert rank["parameters equal"]
    steps, told = ranks[0]["figures"]
    assert len(told) == 2
    assert steps == told


def check_recovery(ranks: list[dict[str, Any]]) -> None:
    """Training with faults equals a run configured with the same micro-batches, and no memory stays allocated."""
    for rank in ranks:
        assert rank["parameters equal"]
        assert rank["retries"] == rank["struck"] >= 0.95 * rank["faults"]
        assert len(rank["live bytes"][0]) >= rank["faults"]
        # A thread of gloo may free a tensor a moment late. What leaks stays allocated in all later steps too.
        kept, expected = ([*accumulate(reversed(live_bytes), min)] for live_bytes in rank["live bytes"])
        assert kept == pytest.approx(expected, abs=1024)
    steps, told = ranks[0]["figures"]
    assert len(told) >= ranks[0]["faults"]
    assert steps == told


def check_resume(ranks: list[dict[str, Any]], *, steps_left: int) -> None:
    assert all(rank["parameters equal"] for rank in ranks)
    steps, resumed = ranks[0]["figures"]
    assert len(steps) == steps_left
    assert resumed == steps


@pytest.mark.parametrize("cut", ["rows", "tokens"])
@pytest.mark.parametrize("kind", KINDS)
def test_global_batch(kind: str, cut: str, outcomes: Any) -> None:
    """However ten samples are cut, the losses agree. Rounding may shift a fake quantized value by a whole step."""
    found = outcomes(kind)[0]["cuts"]
    whole, _ = found["whole"]
    losses, limit = found[cut]
    assert limit == {"rows": "2 rows", "tokens": "140 tokens"}[cut]
    assert len(whole) == 2
    assert losses == pytest.approx(whole, rel=1e-3 if "qat" in kind else 2e-6)


# ---- with optimizers that step within backward

STEPS_IN_BACKWARD = [
    "full_single",
    *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("full", "full_qat")),
]


def _trials_in_backward(kind: str, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    trials = Trials(kind, tiny_dir, output_dir, optimizer_in_bwd=True, clip_grad_norm=None)
    return {"search": trials.search(STRATEGIES[:1]), "growth": trials.growth()}


@pytest.mark.parametrize("kind", STEPS_IN_BACKWARD)
def test_search_and_growth_in_backward(kind: str, tiny_dir: Path, tmp_path: Path) -> None:
    """Each backward pass of a probe changes the weights; they are restored afterwards. The batch grows."""
    ranks = by_rank(_trials_in_backward, kind, shallow_assets(tiny_dir), tmp_path)
    check_search([rank["search"] for rank in ranks], strategies=STRATEGIES[:1])
    assert ranks[0]["growth"] == [2, 4, 6]


def _eight_bit_recovery(kind: str, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    return Trials(kind, tiny_dir, output_dir, **EIGHT_BIT).recovery(points=1)


def test_a_step_with_an_8_bit_optimizer_recovers(tiny_dir: Path, tmp_path: Path) -> None:
    check_recovery(by_rank(_eight_bit_recovery, "full_single", shallow_assets(tiny_dir), tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in RECIPES), ("full_single", EIGHT_BIT)])
def test_every_strategy_and_every_seventh_operation(
    kind: str, more: dict[str, Any], tiny_dir: Path, tmp_path: Path
) -> None:
    ranks = by_rank(_exhaustive_trials, kind, shallow_assets(tiny_dir), tmp_path, more, timeout_s=7200)
    check_parity(kind, [rank["parity"] for rank in ranks], accumulation=1)
    check_search([rank["search"] for rank in ranks], strategies=STRATEGIES)
    assert ranks[0]["growth"] == [2, 4, 6]
    check_recovery([rank["recovery"] for rank in ranks])
    check_resume([rank["resume"] for rank in ranks], steps_left=2)
    check_resume([rank["resume after an epoch"] for rank in ranks], steps_left=3)  # from torchtune's checkpoint
    print(f"{kind}: {ranks[0]['recovery']['struck']} faults, and as many right results")


def _compiled(kind: str, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    return {"losses": Trials(kind, tiny_dir, output_dir).compiled()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [kind for kind in RECIPES if "qat" not in kind])  # torchtune refuses to compile QAT
def test_compile(kind: str, tiny_dir: Path, tmp_path: Path) -> None:
    """Without a search, compiled code trains as eager code does. It needs a C++ compiler and half a minute."""
    eager, compiled = by_rank(_compiled, kind, shallow_assets(tiny_dir), tmp_path)[0]["losses"]
    assert len(eager) == 3
    assert compiled == pytest.approx(eager, rel=1e-4)

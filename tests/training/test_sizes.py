"""Sizes are searched with the most that a train step can need: the longest rows, with gradients beside them.

The device: each token of a micro-batch takes 10 bytes. From a step's second micro-batch on, gradients take 400.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torchtune.datasets import PackedDataset

from tests.support.loaders import step_loader
from tests.support.toys import Samples, search_result
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.search.timing import Timing
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.schedule import gradient_noise_scale
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training import sizes as sizes_module
from torchtune_adaptive.training.batch.limits import MicroBatchLimit, RowLimit, TokenLimit
from torchtune_adaptive.training.batch.loader import StepLoader
from torchtune_adaptive.training.batch.micro_batches import MicroBatch
from torchtune_adaptive.training.batch.row_format import PreferenceRows, RowFormat, TokenRows
from torchtune_adaptive.training.sizes import SizeFinder, Sizes

TOKEN_BYTES, GRADIENT_BYTES = 10, 400
PLENTY_BYTES = 2**24
MAXIMUM: dict[str, Any] = {"use_maximum_batch_size": True}
GROWS: dict[str, Any] = {"batch_increase_function": lambda epoch, size: 1}
AUTO: dict[str, Any] = {"max_tokens_per_micro_batch": "auto"}


class Device:
    """Takes steps; ``tried`` has the number of micro-batches, the rows and their length of each."""

    def __init__(self) -> None:
        self.tried: list[tuple[int, int, int]] = []
        self.model: Any = nn.Linear(1, 1)
        self.loop = Loop(
            micro_step=lambda batch: [batch],
            finish=self._train_step,
            model=self.model,
            optimizers=[],
            device=torch.device("cpu"),
            meter=CpuMeter(exact=False),
            consensus=Consensus(),
        )

    def _train_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        first = micro_batches[0].rows
        self.tried.append((len(micro_batches), len(first), len(first[0]["tokens"])))
        gradients = None
        for rows in (one.rows for one in micro_batches):
            length = max(len(row["tokens"]) for row in rows)
            activations = torch.empty(len(rows) * length * TOKEN_BYTES, dtype=torch.uint8)
            if gradients is None:
                del activations
                gradients = torch.empty(GRADIENT_BYTES, dtype=torch.uint8)

    def find(
        self,
        loader: StepLoader,
        *,
        wanted_rows: int = 4,
        tokenizer_max_seq_len: int | None = None,
        limit_bytes: int = PLENTY_BYTES,
        row_format: RowFormat | None = None,
        **settings: Any,
    ) -> Sizes:
        options = {"margin": 0.0, "power_of_two": False, "memory_limit_bytes": limit_bytes} | settings
        return SizeFinder(
            self.loop,
            loader,
            row_format or TokenRows(-100),
            AdaptiveSettings(**options),
            models=[self.model],
            wanted_rows=wanted_rows,
            tokenizer_max_seq_len=tokenizer_max_seq_len,
        ).find()


# ---- what is found


def test_the_largest_micro_batch_of_the_longest_row_is_found_rounded_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device, loader = Device(), step_loader(Samples(3, 8, *[5] * 50))
    found = device.find(loader, limit_bytes=1100, power_of_two=True, **MAXIMUM)
    (message,) = caplog.messages
    assert message.startswith("Probes, with the figures of rank 0:\nbatch_size")
    assert found.result is not None
    assert (found.result.exact_batch_size, found.result.batch_size, found.fitting_rows) == (13, 8, 8)
    assert found.seq_len == 8
    assert (found.max_rows, found.token_budget, found.timings) == (None, None, None)
    assert {(micro_batches, length) for micro_batches, _, length in device.tried} == {(1, 8)}


def test_a_search_from_below_starts_at_the_configs_batch_size() -> None:
    device, loader = Device(), step_loader(Samples(*[8] * 50))
    device.find(loader, wanted_rows=5, limit_bytes=1100, strategy="binary_search", **MAXIMUM)
    assert [rows for _, rows, _ in device.tried[1:4]] == [5, 10, 20]


@pytest.mark.parametrize("growth_limit", ["none", 50])
def test_growth_beyond_memory_does_without_a_search_where_nothing_limits_memory(growth_limit: Any) -> None:
    device, loader = Device(), step_loader(Samples(*[8] * 50))
    found = device.find(loader, memory_limit_bytes=None, growth_limit=growth_limit, **GROWS)
    assert (found, device.tried) == (Sizes(), [])


# ---- the bound of a search


@pytest.mark.parametrize(
    ("settings", "loader", "bound"),
    [
        (MAXIMUM, {}, 120),
        (MAXIMUM, {"micro_steps": 3, "ranks": 2}, 20),
        (MAXIMUM | {"max_batch_size": 7}, {}, 7),
        (MAXIMUM | {"max_batch_size": 500}, {}, 120),
        (AUTO, {"micro_steps": 3}, 12),
        (AUTO | GROWS, {"micro_steps": 3}, 40),
        (MAXIMUM | {"global_batch_size": 9}, {"batch_size": 9, "is_global": True, "ranks": 2}, 5),
        (GROWS | {"global_batch_size": 9, "growth_limit": 21}, {"batch_size": 9, "is_global": True, "ranks": 2}, 11),
        (GROWS | {"global_batch_size": 9, "growth_limit": 5}, {"batch_size": 9, "is_global": True}, 9),
        (GROWS | {"global_batch_size": 9, "growth_limit": 500}, {"batch_size": 9, "is_global": True}, 120),
    ],
)
def test_no_more_rows_are_tried_than_a_micro_step_can_have(
    settings: dict[str, Any], loader: dict[str, Any], bound: int
) -> None:
    device = Device()
    found = device.find(step_loader(Samples(*[8] * 120), **loader), strategy="decrease_until_oom", **settings)
    assert found.result is not None
    assert found.result.bound == found.result.exact_batch_size == bound
    assert max(rows for _, rows, _ in device.tried) == bound


@pytest.mark.parametrize(
    ("settings", "loader", "micro_batches", "of_all_rows"),
    [
        (MAXIMUM, {"micro_steps": 1}, 1, 1),
        (MAXIMUM, {"micro_steps": 2}, 2, 2),
        (MAXIMUM | {"growth_limit": "none"}, {"micro_steps": 1}, 2, 2),
        (GROWS | {"growth_limit": 50}, {"micro_steps": 1}, 2, 2),
        ({"batch_increase_function": gradient_noise_scale()}, {"micro_steps": 1}, 2, 2),  # a measured step has halves
        (AUTO, {"batch_size": 40, "micro_steps": 1}, 2, 2),
        (MAXIMUM | {"max_tokens_per_micro_batch": 8000}, {"micro_steps": 1}, 2, 2),
        (MAXIMUM | {"global_batch_size": 40}, {"batch_size": 40, "is_global": True, "ranks": 2}, 2, 1),
    ],
)
def test_a_probe_has_a_second_micro_batch_where_training_may_have_one(
    settings: dict[str, Any], loader: dict[str, Any], micro_batches: int, of_all_rows: int
) -> None:
    device = Device()
    found = device.find(step_loader(Samples(*[8] * 120), **loader), strategy="binary_search", **settings)
    assert found.result is not None
    sizes = {rows for _, rows, _ in device.tried}
    assert len(sizes) > 2
    assert {rows: count for count, rows, _ in device.tried} == dict.fromkeys(sizes, micro_batches) | {
        found.result.bound: of_all_rows
    }


# ---- the longest row


def test_rows_shorter_than_the_tokenizer_allows_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def warnings(**options: Any) -> list[str]:
        caplog.clear()
        Device().find(step_loader(Samples(*[8] * 50)), **options, **MAXIMUM)
        return [message for message in caplog.messages if not message.startswith("Probes, with")]

    assert warnings(seq_len=5, tokenizer_max_seq_len=20) == [
        "Rows can have up to 20 tokens, but probes have 5: longer rows may not fit."
    ]
    assert warnings(seq_len=20, tokenizer_max_seq_len=20) == warnings(seq_len=5) == []


def test_rows_longer_than_the_models_positions_are_refused() -> None:
    device = Device()
    device.model.max_seq_len = 16
    device.find(step_loader(Samples(*[8] * 50)), tokenizer_max_seq_len=16, **MAXIMUM)
    device.tried.clear()
    with pytest.raises(InputError, match=r"Rows have 17 tokens, but the model takes at most 16; set `tokenizer\.max"):
        device.find(step_loader(Samples(*[8] * 50)), tokenizer_max_seq_len=17, **MAXIMUM)
    assert device.tried == []


def test_data_too_few_for_a_step_of_single_rows_are_refused_before_anything_runs() -> None:
    device = Device()
    with pytest.raises(InputError, match=r"`dataset` has .* too few for one optimizer step"):
        device.find(step_loader(Samples(*[8] * 5), micro_steps=6), **MAXIMUM)
    assert device.tried == []


# ---- without a search


def test_without_a_search_nothing_is_found_and_nothing_runs() -> None:
    device, samples = Device(), Samples(*[8] * 50)
    assert device.find(step_loader(samples)) == Sizes()
    assert (device.tried, samples.read) == ([], [])


def test_a_token_budget_of_the_config_is_checked_against_samples_that_may_be_longer() -> None:
    device, samples = Device(), Samples(8, 9, 7)
    assert device.find(step_loader(samples, batch_size=1), max_tokens_per_micro_batch=9) == Sizes(token_budget=9)
    with pytest.raises(InputError, match="at least 9, the tokens of sample 1, but is 8"):
        device.find(step_loader(samples, batch_size=1), max_tokens_per_micro_batch=8)
    with pytest.raises(InputError, match="at least 9, the tokens of sample 1, but is 8"):
        device.find(step_loader(samples, batch_size=1), max_tokens_per_micro_batch=8, tokenizer_max_seq_len=9)
    samples.read.clear()
    device.find(step_loader(samples, batch_size=1), max_tokens_per_micro_batch=8, tokenizer_max_seq_len=8)
    assert samples.read == []


@pytest.mark.parametrize(("budget", "is_checked"), [(15, True), (16, False)])
def test_a_token_budget_of_pairs_is_checked_unless_both_sequences_fit(budget: int, is_checked: bool) -> None:
    pairs = PreferenceRows()
    row = {"chosen_input_ids": [1] * 8, "rejected_input_ids": [2] * 3}
    dataset: Any = [row | {"chosen_labels": [1] * 8, "rejected_labels": [2] * 3}]
    loader = step_loader(dataset, batch_size=1)
    with pytest.raises(InputError, match="at least 16, the tokens of sample 0") if is_checked else nullcontext():
        Device().find(loader, row_format=pairs, max_tokens_per_micro_batch=budget, tokenizer_max_seq_len=8)


@pytest.mark.parametrize("budget", [64, "auto"])
def test_packs_have_no_token_budget(budget: Any) -> None:
    samples: Any = Samples(*[3] * 50)
    packs = step_loader(PackedDataset(samples, max_seq_len=8))
    with pytest.raises(InputError) as refused:
        Device().find(packs, max_tokens_per_micro_batch=budget)
    assert str(refused.value) == (
        "`max_tokens_per_micro_batch` has no effect with `dataset.packed: True`: packed rows have one length."
    )
    assert Device().find(packs) == Sizes()


@pytest.mark.parametrize(("settings", "max_rows"), [({}, 3), (GROWS | {"growth_limit": "none"}, 3), (MAXIMUM, None)])
def test_a_global_batch_is_cut_by_the_configs_batch_size_unless_memory_decides(
    settings: dict[str, Any], max_rows: int | None
) -> None:
    loader = step_loader(Samples(*[8] * 50), batch_size=10, is_global=True)
    found = Device().find(loader, wanted_rows=3, global_batch_size=10, **settings)
    assert found.max_rows == max_rows


# ---- tokens


def test_the_token_budget_of_the_longest_rows_is_exact_to_the_token(caplog: pytest.LogCaptureFixture) -> None:
    device, loader = Device(), step_loader(Samples(*[32] * 50), batch_size=50)
    found = device.find(loader, limit_bytes=10 * 1000 + GRADIENT_BYTES, **AUTO)
    assert found.result is not None
    assert (found.result.exact_batch_size, found.fitting_rows, found.token_budget) == (31, 31, 1000)  # 31.25 rows
    assert {length for _, _, length in device.tried} == {32, 1000 // 32, 16}
    assert max(rows for _, rows, _ in device.tried) == 50  # although 62 rows of 16 tokens would fill it
    assert caplog.messages[-1].startswith("Probes of other row lengths:\nrows of")
    assert caplog.messages[-1].endswith("token budget: 1000 tokens with padding")
    table = [line.split() for line in caplog.messages[-1].splitlines()[3:-1]]
    assert {int(length) for length, *_ in table} == {1000 // 32, 16}
    assert str(found.limit(100)) == "1000 tokens"


def test_shorter_rows_of_a_token_budget_may_be_more_than_the_largest_batch_size() -> None:
    device, loader = Device(), step_loader(Samples(*[32] * 50), batch_size=50)
    found = device.find(loader, limit_bytes=10 * 1000 + GRADIENT_BYTES, max_batch_size=20, **AUTO)
    assert (found.fitting_rows, found.token_budget) == (20, 20 * 32)
    assert {length: max(rows for _, rows, tried in device.tried if tried == length) for length in (32, 16)} == {
        32: 20,
        16: 40,
    }


@pytest.mark.parametrize(("strategy", "budget"), [("linear_extrapolation", 1000), ("binary_search", 31 * 32)])
def test_a_token_budget_is_searched_exactly_although_the_rows_are_rounded(strategy: str, budget: int) -> None:
    """Without a forecast the budget is a whole number of the longest rows."""

    def tried_at_other_lengths(*, power_of_two: bool) -> list[tuple[int, int, int]]:
        device, loader = Device(), step_loader(Samples(*[32] * 50), batch_size=50)
        options: dict[str, Any] = {"strategy": strategy, "power_of_two": power_of_two} | AUTO
        found = device.find(loader, limit_bytes=10 * 1000 + GRADIENT_BYTES, **options)
        assert (found.fitting_rows, found.token_budget) == (16 if power_of_two else 31, budget)
        return [one for one in device.tried if one[2] != 32]

    assert tried_at_other_lengths(power_of_two=True) == tried_at_other_lengths(power_of_two=False)


# ---- speed


class Stopwatch:
    """Takes the place of ``time_in_turns``: notes what it is to time, and gives each limit a rate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate: Callable[[MicroBatchLimit], float]) -> None:
        self._rate = rate
        monkeypatch.setattr(sizes_module, "time_in_turns", self._time)

    def _time(self, loop: Any, steps: Any, *, num_tokens: Any) -> dict[MicroBatchLimit, Timing]:
        self.rows = {str(limit): [[len(one.rows) for one in step] for step in of] for limit, of in steps.items()}
        self.num_tokens = {str(limit): number for limit, number in num_tokens.items()}
        return {limit: Timing((1.0,), int(self._rate(limit))) for limit in steps}


def test_the_smallest_size_that_is_as_fast_as_the_best_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {12: 1000, 6: 990, 3: 900, 1: 300}
    timed = Stopwatch(monkeypatch, lambda limit: rates[limit.size])
    loader = step_loader(Samples(*[8] * 120), micro_steps=3)
    found = Device().find(loader, max_batch_size=12, objective="speed", **MAXIMUM)
    assert timed.rows == {str(RowLimit(rows)): [[rows, rows]] for rows in (1, 3, 6, 12)}
    assert timed.num_tokens == {str(RowLimit(rows)): 2 * rows * 8 for rows in (1, 3, 6, 12)}
    assert found.result is not None
    assert (found.fitting_rows, found.result.batch_size) == (6, 12)
    assert found.timings == {RowLimit(rows): Timing((1.0,), rates[rows]) for rows in (1, 3, 6, 12)}
    assert found.max_rows is None


def test_the_given_samples_of_a_step_are_cut_in_rows_the_configs_own_first(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Stopwatch(monkeypatch, lambda limit: 1000 if limit.size >= 4 else 100)
    loader = step_loader(Samples(*[8] * 120), batch_size=12, is_global=True)
    found = Device().find(loader, objective="speed", global_batch_size=12, wanted_rows=5, **MAXIMUM)
    assert list(timed.rows) == ["5 rows", "1 row", "3 rows", "6 rows", "12 rows"]  # of one length: no tokens
    assert timed.rows["5 rows"] == [[5, 5, 2]] * 3  # 36 samples are at least 32
    assert timed.num_tokens["5 rows"] == 36 * 8
    assert (found.fitting_rows, found.max_rows, found.token_budget) == (5, 5, None)


def test_rows_of_different_lengths_are_also_cut_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Stopwatch(monkeypatch, lambda limit: limit.size if limit.unit == "tokens" else 1)
    loader = step_loader(Samples(*[8, 2, 4, 2, 6, 2] * 20), batch_size=12, is_global=True)
    found = Device().find(loader, objective="speed", global_batch_size=12, **MAXIMUM)
    budgets = [int(name.split()[0]) for name in timed.rows if name.endswith("tokens")]
    assert budgets == sorted(budgets)
    assert min(budgets) >= 8  # the longest row
    assert all(sum(map(sum, steps)) == 36 for steps in timed.rows.values())
    assert len(set(timed.num_tokens.values())) == 1
    assert found.token_budget == budgets[-1]


# ---- limits


@pytest.mark.parametrize(
    ("sizes", "rows", "limit"),
    [
        (Sizes(), 32, RowLimit(32)),
        (Sizes(max_rows=8), 32, RowLimit(8)),
        (Sizes(result=search_result(), fitting_rows=8), 13, RowLimit(13)),
        (Sizes(result=search_result(), fitting_rows=8), 14, RowLimit(8)),
        (Sizes(result=search_result(), fitting_rows=8, max_rows=10), 20, RowLimit(10)),
        (Sizes(token_budget=512), 32, TokenLimit(512)),
        (Sizes(token_budget=512, max_rows=3, result=search_result()), 32, TokenLimit(512)),
    ],
)
def test_a_micro_batch_is_as_large_as_asked_for_where_that_fits(
    sizes: Sizes, rows: int, limit: MicroBatchLimit
) -> None:
    assert sizes.limit(rows) == limit

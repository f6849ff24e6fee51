"""Rows of every length fit within the token budget, and it is the largest. For ranks: test_find_max_batch_size."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.engine.search.test_find_max_batch_size import peak_of
from tests.support.faults import same_bits
from torchtune_adaptive import InputError, NothingFitsError, TokenSearchResult, find_max_tokens

SEQ_LEN, VOCABULARY, WIDTH = 128, 50, 8
LENGTHS = range(16, SEQ_LEN + 1, 16)


class Loop:
    """A training loop on rows of tokens, padded: ``[rows, length]``."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleList([nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def make_batch(self, rows: int, length: int) -> torch.Tensor:
        return torch.ones(rows, length, dtype=torch.long)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """The hidden states of ``tokens``, [rows, length, WIDTH]."""
        return F.gelu(self.model[1](self.model[0](tokens)))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.hidden(tokens).square().sum()

    def train_step(self, batch: torch.Tensor) -> None:
        for _ in range(2):
            self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def find(self, limit_bytes: int, **options: Any) -> TokenSearchResult:
        options = {"seq_len": SEQ_LEN, "margin": 0.0, "memory_limit": limit_bytes} | options
        return find_max_tokens(self.train_step, self.make_batch, model=self.model, optimizer=self.optimizer, **options)


class Attention(Loop):
    """Scores take memory that grows with the square of a row's length."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(tokens)
        return (hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden


class Packed(Loop):
    """Documents follow each other in one row."""

    def make_batch(self, rows: int, length: int) -> torch.Tensor:
        return torch.ones(1, rows * length, dtype=torch.long)


class CostlyRows(Loop):
    """Each row has as many tokens more, such as an image: short rows need the most memory for each token."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().hidden(F.pad(tokens, (32, 0)))


LIMITS: dict[type[Loop], int] = {Attention: 1_500_000, Packed: 210_000, CostlyRows: 600_000}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIMITS, ids=lambda kind: kind.__name__)
def test_rows_of_every_length_fit_within_the_budget_and_not_with_a_short_row_more(kind: type[Loop]) -> None:
    loop = kind()
    before = [tensor.clone() for tensor in loop.model.parameters()]
    found = loop.find(LIMITS[kind])
    assert same_bits(before, list(loop.model.parameters()))
    assert not loop.optimizer.state
    loop.train_step(loop.make_batch(1, SEQ_LEN))  # creates the optimizer's state

    def fits(tokens: int) -> list[bool]:
        batches = (loop.make_batch(tokens // length, length) for length in LENGTHS)
        return [peak_of(loop.train_step, batch, loop) <= LIMITS[kind] for batch in batches]

    assert found.max_tokens > 4 * SEQ_LEN
    assert all(fits(found.max_tokens))
    assert not all(fits(found.max_tokens + min(LENGTHS)))


def test_the_result_says_what_was_tried() -> None:
    found = CostlyRows().find(LIMITS[CostlyRows])
    assert found.max_tokens < found.longest.exact_batch_size * SEQ_LEN
    assert {length for length, _ in found.shorter} >= {64, 32, 16}
    assert str(found).startswith(f"{found.max_tokens} tokens (rows of 128 tokens: {found.longest.exact_batch_size};")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seq_len": 0}, "`seq_len` must be at least 1, but is 0 instead"),
        ({"max_rows": 1.5}, "`max_rows` must be an integer, but is 1.5 instead"),
        ({"memory_limit": "lots"}, "`memory_limit` must be a size"),
    ],
)
def test_bad_arguments_are_refused_before_any_step(options: dict[str, Any], sentence: str) -> None:
    loop = Loop()
    steps: list[torch.Tensor] = []
    loop.train_step = lambda batch: steps.append(batch)
    with pytest.raises(InputError, match=sentence):
        loop.find(10**6, **options)
    assert steps == []


def test_nothing_fits_if_the_longest_row_does_not() -> None:
    with pytest.raises(NothingFitsError, match="not even one row fits"):
        Attention().find(100_000)


def test_a_bound_on_rows_is_kept() -> None:
    found = Loop().find(10**6, max_rows=3)
    assert found.max_tokens == 3 * SEQ_LEN
    assert max(probe.batch_size for probe in found.longest.probes) == 3
    assert all(probe.batch_size <= 3 for _, probe in found.shorter)


def test_a_data_set_that_ends_before_memory_does_is_the_bound() -> None:
    loop = Loop()
    loop.make_batch = lambda rows, length: torch.ones(min(rows, 5), length, dtype=torch.long)
    found = loop.find(10**6)
    assert (found.max_tokens, found.longest.exact_batch_size, found.longest.bound) == (5 * SEQ_LEN, 5, 5)


def test_shorter_rows_that_are_fewer_than_the_budget_allows_do_not_lower_it() -> None:
    loop = Loop()
    expected = loop.find(250_000).longest.exact_batch_size
    loop.make_batch = lambda rows, length: torch.ones(min(rows, expected + 1), length, dtype=torch.long)
    assert loop.find(250_000).max_tokens >= expected * SEQ_LEN

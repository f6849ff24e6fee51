"""Rows of random tokens: data that a config can name and that needs no hub."""

import math
import random
from typing import Any, Literal

import numpy as np
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.datasets import PackedDataset

SHORTEST_RISING = 0.8  # of the greatest length, where lengths rise
_MEDIAN_FRACTION, _SPREAD = 0.25, 0.7  # of lengths that differ, as in data for instruction tuning


class PlainTokenizer:
    """What recipes need of a tokenizer."""

    pad_id = 0

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len


Lengths = Literal["equal", "random", "rising"]


class RandomRows:
    """``num_rows`` samples of lengths up to the tokenizer's greatest, which at least one has.

    ``lengths`` are all equal, or random, or rise to the greatest.
    """

    def __init__(
        self, tokenizer: PlainTokenizer, *, num_rows: int, vocab_size: int, lengths: Lengths = "equal"
    ) -> None:
        self._vocab_size = vocab_size
        dice, longest = random.Random(0), tokenizer.max_seq_len
        self._lengths = [longest] * num_rows
        if lengths == "rising":
            rise = (1 - SHORTEST_RISING) / max(1, num_rows - 1)
            self._lengths = [math.ceil(longest * (1 - rise * place)) for place in reversed(range(num_rows))]
        elif lengths == "random":
            drawn = (dice.lognormvariate(0.0, _SPREAD) * _MEDIAN_FRACTION * longest for _ in self._lengths)
            self._lengths = [min(longest, max(8, int(length))) for length in drawn]
            self._lengths[dice.randrange(num_rows)] = longest

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        dice = random.Random(index)
        tokens = dice.choices(range(1, self._vocab_size), k=self._lengths[index])
        labels = list(np.array([CROSS_ENTROPY_IGNORE_IDX, *tokens[1:]]))  # NumPy's numbers, as torchtune has them
        return {"tokens": tokens, "labels": labels}  # the first is not predicted


class RandomPairs(RandomRows):
    """As ``RandomRows``, of chosen and rejected answers of equal length."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return {
            f"{answer}_{part}": row[key]
            for answer in ("chosen", "rejected")
            for part, key in (("input_ids", "tokens"), ("labels", "labels"))
        }


def packed_rows(
    tokenizer: PlainTokenizer, *, num_rows: int, vocab_size: int, lengths: Lengths = "random", packed: bool = True
) -> PackedDataset:
    """``RandomRows`` of random lengths in packs of the greatest length, for attention within each sample alone."""
    rows: Any = RandomRows(tokenizer, num_rows=num_rows, vocab_size=vocab_size, lengths="random")
    return PackedDataset(rows, max_seq_len=tokenizer.max_seq_len)

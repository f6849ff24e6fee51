"""The training data: rows of random tokens, of one length or of different lengths."""

from collections.abc import Sequence

import numpy as np
import torch

NUM_ROWS = 16384
VOCAB_SIZE = 512
IGNORED = -100
SEED = 0

Batch = dict[str, torch.Tensor]


class Rows(torch.utils.data.Dataset[np.ndarray]):
    """Rows of random tokens in host memory, as NumPy arrays that no meter counts.

    Args:
        lengths: the length of each row.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.greatest = max(lengths)
        generator = np.random.default_rng(SEED)
        self._rows = [generator.integers(VOCAB_SIZE, size=length, dtype=np.int16) for length in lengths]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._rows[index]

    def in_order(self, start: int, rows: int) -> list[np.ndarray]:
        """``rows`` rows from ``start`` on; after the last row it continues with the first."""
        return [self._rows[index % len(self)] for index in range(start, start + rows)]

    def worst(self, rows: int) -> list[np.ndarray]:
        """``rows`` rows of the greatest length."""
        return [np.zeros(self.greatest, dtype=np.int16)] * rows


def rows_of_one_length(length: int) -> Rows:
    """Rows that all have ``length`` tokens."""
    return Rows([length] * NUM_ROWS)


def rows_of_different_lengths(median: float, sigma: float, shortest: int, longest: int) -> Rows:
    """Lengths are lognormal, as those of texts are, and cut at both ends."""
    drawn = np.random.default_rng(SEED).lognormal(np.log(median), sigma, size=NUM_ROWS)
    return Rows([int(length) for length in drawn.round().clip(shortest, longest)])


def padded(rows: Sequence[np.ndarray]) -> Batch:
    """Rows as tokens and labels, padded to the longest: [rows, length]."""
    tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    labels = np.full_like(tokens, IGNORED)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
        labels[index, : len(row) - 1] = row[1:]
    return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

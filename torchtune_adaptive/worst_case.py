"""The longest batch that training can meet: the batch a probe has to survive."""

from collections.abc import Callable
from typing import Any

import torch
from torchtune.datasets import ConcatDataset, PackedDataset
from tqdm import tqdm

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError

Row = dict[str, Any]

_REHEARSED_TOKENS = (16, 24)


def worst_case_row(
    dataset: Any, *, seq_len: int | None, tokenizer_max_seq_len: int | None, consensus: Consensus
) -> tuple[Row, int]:
    """A sample of ``dataset`` brought to the worst-case length, and that length in tokens.

    The length is ``seq_len`` if given, else the tokenizer's ``max_seq_len``, else the longest sample's, for which
    the data set is read once. A pack is as long as it is. Every token counts in the loss. A collective.

    Raises:
        InputError: ``seq_len`` differs from the length of the packs.
    """
    row = dict(dataset[0])
    if is_packed(dataset):
        packed_len = len(row["tokens"])
        if seq_len not in (None, packed_len):
            raise InputError(f"`seq_len` must be null or the packs' length ({packed_len}), but is {seq_len} instead.")
        return row, packed_len
    length = seq_len or tokenizer_max_seq_len or longest_sample(dataset, consensus)
    return stretched_row(row, length), length


def longest_sample(dataset: Any, consensus: Consensus) -> int:
    """Tokens of the longest sample of ``dataset``; each rank reads its share. A collective."""
    share = range(consensus.rank, len(dataset), consensus.world_size)
    lengths = (
        len(dataset[index]["tokens"])
        for index in tqdm(share, desc="looking for the longest sample", disable=consensus.rank != 0)
    )
    return consensus.max_over_ranks(max(lengths, default=0))


def window_maker(row: Row, *, micro_batches: int) -> Callable[[int], list[list[Row]]]:
    """``make_window(n)``: micro-batches of n times ``row``; at most two: the second finds gradients there."""
    return lambda batch_size: [[row] * batch_size] * min(2, micro_batches)


def small_batches(dataset: Any, batch_size: int) -> list[list[Row]]:
    """Two batches of the first samples that differ in shape, neither above ``batch_size`` rows.

    Rows of tokens and labels are cut to a few; others, packs among them, are as long as they are.
    """
    first, second = dataset[0], dataset[min(1, len(dataset) - 1)]
    small, large = _REHEARSED_TOKENS
    return [[_cut(first, small)], [_cut(row, large) for row in ([first, second] if batch_size > 1 else [second])]]


def silent_row(row: Row, ignore_index: int) -> Row:
    """A few tokens of ``row`` of which none counts in the loss: what a rank computes with that has nothing left."""
    few = _cut(row, _REHEARSED_TOKENS[0])
    labels = few["labels"]
    silence = (
        torch.full_like(labels, ignore_index) if isinstance(labels, torch.Tensor) else [ignore_index] * len(labels)
    )
    return few | {"labels": silence}


def refuse_long_samples(dataset: Any, *, max_tokens: int, consensus: Consensus) -> None:
    """Read ``dataset`` once, each rank its share, and refuse a sample of more than ``max_tokens``. A collective.

    Raises:
        InputError: there is one; on every rank, with the first one's index and length.
    """
    share = range(consensus.rank, len(dataset), consensus.world_size)
    progress = tqdm(share, desc="looking for samples above the token budget", disable=consensus.rank != 0)
    lengths = ((index, len(dataset[index]["tokens"])) for index in progress)
    mine = next(((index, length) for index, length in lengths if length > max_tokens), None)
    found = [one for one in consensus.from_all_ranks(mine) if one is not None]
    if found:
        index, length = min(found)
        raise InputError(
            f"`max_tokens_per_micro_batch` must be at least every sample's length, but is {max_tokens},"
            f" and sample {index} has {length} tokens."
        )


def stretched_row(row: Row, length: int) -> Row:
    """``row`` repeated or cut to ``length`` tokens that all count in the loss."""
    tokens = _stretched(row["tokens"], length)
    return row | {"tokens": tokens, "labels": list(tokens)}


def _cut(row: Row, length: int) -> Row:
    is_plain = set(row) <= {"tokens", "labels", "mask"} and isinstance(row["tokens"], list)
    return {name: values[:length] for name, values in row.items()} if is_plain else row


def is_packed(dataset: Any) -> bool:
    """Whether the rows of ``dataset`` are packs, all of one length."""
    return isinstance(dataset, PackedDataset) or (isinstance(dataset, ConcatDataset) and dataset.packed)


def _stretched(tokens: Any, length: int) -> list[int]:
    """``tokens``, repeated or cut to ``length``."""
    tokens = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
    return (tokens * (length // max(len(tokens), 1) + 1))[:length]

"""The format of samples: their length, and samples for probes. One class for each kind of data set."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.datasets import ConcatDataset, PackedDataset

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.errors import InputError, quote, reason_of

Row: TypeAlias = dict[str, Any]

_ANSWERS, _PARTS = ("chosen", "rejected"), ("input_ids", "labels")
_DRY_RUN_TOKENS = (16, 24)  # row lengths of the two batches of a dry run, which must differ in shape


class RowFormat(ABC):
    """Describes a data set's samples. Has no state.

    Attributes:
        keys: the keys of every sample.
        sequences: sequences per sample in a batch, all padded to the longest one.
        memory_follows_tokens: whether a micro-batch's memory depends on its padded tokens alone.
    """

    keys: tuple[str, ...] = ()
    sequences = 1
    memory_follows_tokens = True

    @abstractmethod
    def num_tokens(self, row: Row) -> int:
        """The length in tokens to which the sample pads its micro-batch."""

    def padded_tokens(self, row: Row) -> int:
        """Padded tokens of the sample in a micro-batch without longer samples."""
        return self.sequences * self.num_tokens(row)

    def own_tokens(self, row: Row) -> int:
        """Tokens of the sample without padding."""
        return self.num_tokens(row)

    def num_targets(self, row: Row) -> int:
        """The weight of the sample in a mean loss."""
        return 1

    @abstractmethod
    def stretched(self, row: Row, length: int) -> Row:
        """The sample repeated or truncated to ``length`` tokens, all of which count in the loss."""

    def shortened(self, row: Row, length: int) -> Row:
        """The sample truncated to ``length`` tokens. It is returned as it is if it is packed or has other keys."""
        can_be_cut = set(row) <= {*self.keys, "mask"} and isinstance(row[self.keys[0]], list)
        return {name: values[:length] for name, values in row.items()} if can_be_cut else row

    @abstractmethod
    def masked(self, row: Row) -> Row:
        """A short sample without weight in the loss, for a rank without samples."""

    def worst_case(
        self, dataset: Any, *, seq_len: int | None, tokenizer_max_seq_len: int | None, consensus: Consensus
    ) -> Row:
        """A sample of the greatest length that can occur in training. A collective.

        The length is ``seq_len`` if given, else the tokenizer's ``max_seq_len``, else the length of the longest sample,
        for which the whole data set is read once. Packed samples have one length.

        Raises:
            InputError: ``seq_len`` differs from the length of packed samples.
        """
        row = dict(dataset[0])
        if is_packed(dataset):
            packed_len = self.num_tokens(row)
            if seq_len not in (None, packed_len):
                raise InputError(
                    f"`seq_len` must be null or the packs' length ({packed_len}), but is {seq_len} instead."
                )
            return row
        length = seq_len or tokenizer_max_seq_len
        if length is None:
            own = self._lengths(dataset, consensus, task="finding the longest sample")
            length = consensus.max_over_ranks(max((number for _, number in own), default=0))
        return self.stretched(row, length)

    def sample(self, dataset: Any, index: int) -> Row:
        """The sample of ``dataset`` at ``index``.

        Raises:
            InputError: it cannot be loaded, or has another format.
        """
        row = load_sample(dataset, index)
        if not isinstance(row, Mapping) or not row.keys() >= {*self.keys}:
            has = f"has {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"is {quote(row)}"
            raise InputError(f"Samples of `dataset` need {', '.join(self.keys)}, but {_place(index)} {has}.")
        return row

    def check_lengths(self, dataset: Any, *, max_tokens: int, consensus: Consensus) -> None:
        """Read the whole data set once, and check that no sample is longer than ``max_tokens``. A collective.

        Raises:
            InputError: a sample is longer. Raised on every rank, with the index and length of the first such sample.
        """
        lengths = self._lengths(dataset, consensus, task="checking samples against the token budget")
        tokens = ((index, self.sequences * length) for index, length in lengths)
        too_long = next(((index, number) for index, number in tokens if number > max_tokens), None)
        found = [one for one in consensus.from_all_ranks(too_long) if one is not None]
        if found:
            index, length = min(found)
            raise InputError(
                f"`max_tokens_per_micro_batch` must be at least {length}, the tokens of sample {index}, but is"
                f" {max_tokens} instead."
            )

    def small_batches(self, dataset: Any, batch_size: int) -> list[list[Row]]:
        """Two batches of the first samples, of different shapes, each of at most ``batch_size`` rows.

        Rows are truncated to a few tokens, unless they are packed.
        """
        first, second = dataset[0], dataset[min(1, len(dataset) - 1)]
        small, large = _DRY_RUN_TOKENS
        rows = [first, second] if batch_size > 1 else [second]
        return [[self.shortened(first, small)], [self.shortened(row, large) for row in rows]]

    def collating(self, collate: Callable[[Sequence[Row]], Any]) -> Callable[[Sequence[Row]], Any]:
        """``collate``, for samples of this format. A first row without tokens gets one that does not count in the loss.

        torchtune's models fail on a batch without tokens, and its function that collates pairs if the first has none.
        """

        def collated(rows: Sequence[Row]) -> Any:
            if not self.num_tokens(rows[0]):
                rows = [self.masked(self.stretched(rows[0], 1)), *rows[1:]]
            return collate(rows)

        return collated

    def _lengths(self, dataset: Any, consensus: Consensus, *, task: str) -> Iterator[tuple[int, int]]:
        """Index and length of each sample of this rank's share."""
        return ((index, self.num_tokens(row)) for index, row in self._share(dataset, consensus, task=task))

    def _share(self, dataset: Any, consensus: Consensus, *, task: str) -> Iterator[tuple[int, Row]]:
        """Index and sample of each of this rank's share, with a progress bar."""
        share = range(consensus.rank, len(dataset), consensus.world_size)
        for index in Bar(share, desc=task, disable=consensus.rank != 0):
            yield index, self.sample(dataset, index)


class TokenRows(RowFormat):
    """Rows of ``tokens`` and ``labels``, for supervised finetuning: lists, or tensors or arrays of one dimension.

    torchtune's data sets add a ``mask``, True for tokens without a label. A `collate_fn` of one's own may read it, and
    other columns with a value for each token, such as ``input_pos``. Rows that are made here have all of them, each in
    its own type.

    Args:
        ignore_index: the label of tokens that do not count in the loss.
    """

    keys = ("tokens", "labels")

    def __init__(self, ignore_index: int) -> None:
        self._ignore_index = ignore_index

    def num_tokens(self, row: Row) -> int:
        return len(row["tokens"])

    def num_targets(self, row: Row) -> int:
        return int(np.count_nonzero(np.asarray(row["labels"][1:]) != self._ignore_index))

    def stretched(self, row: Row, length: int) -> Row:
        tokens, labels = row["tokens"], row["labels"]
        columns = {name: values for name, values in row.items() if _is_column(values) and len(values) == len(tokens)}
        longer = {name: alike(repeated(values, length), values) for name, values in columns.items()}
        longer |= {"tokens": alike(repeated(tokens, length), tokens), "labels": alike(repeated(tokens, length), labels)}
        return self._with_mask(row | longer, is_masked=False)

    def masked(self, row: Row) -> Row:
        short = self.shortened(row, _DRY_RUN_TOKENS[0])
        labels = alike([self._ignore_index] * len(short["labels"]), short["labels"])
        return self._with_mask(short | {"labels": labels}, is_masked=True)

    def _with_mask(self, row: Row, *, is_masked: bool) -> Row:
        """``row``, whose ``mask`` has one value for all tokens, if it is a column of them."""
        mask = row.get("mask")
        return row | {"mask": alike([is_masked] * len(row["labels"]), mask)} if _is_column(mask) else row


class PreferenceRows(RowFormat):
    """Pairs of a chosen and a rejected answer, for direct preference optimization."""

    keys = tuple(f"{answer}_{part}" for answer in _ANSWERS for part in _PARTS)
    sequences = 2

    def num_tokens(self, row: Row) -> int:
        return max(len(row["chosen_input_ids"]), len(row["rejected_input_ids"]))

    def own_tokens(self, row: Row) -> int:
        return sum(len(row[f"{answer}_input_ids"]) for answer in _ANSWERS)

    def stretched(self, row: Row, length: int) -> Row:
        longest = max(row["chosen_input_ids"], row["rejected_input_ids"], key=len)
        tokens = repeated(longest, length)
        return row | {f"{answer}_{part}": list(tokens) for answer in _ANSWERS for part in _PARTS}

    def masked(self, row: Row) -> Row:
        short = self.shortened(row, _DRY_RUN_TOKENS[0])
        masked = {f"{one}_labels": [CROSS_ENTROPY_IGNORE_IDX] * len(short[f"{one}_labels"]) for one in _ANSWERS}
        return short | masked


def load_sample(dataset: Any, index: int) -> Row:
    """The sample of ``dataset`` at ``index``.

    Raises:
        InputError: it cannot be loaded.
    """
    try:
        return dataset[index]
    except (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise InputError(f"`dataset` cannot load {_place(index)}: {reason_of(error)}.") from error


def _place(index: int) -> str:
    return f"sample {index}" if index else "its first sample"


class NumberedSamples(Dataset[Row]):
    """The samples of ``dataset``, each of at most ``longest`` tokens; None: of any length.

    Raises:
        InputError: a sample cannot be loaded, has another format, or is longer; the message has its number.
    """

    def __init__(self, dataset: Any, row_format: RowFormat, *, longest: int | None) -> None:
        self._dataset = dataset
        self._row_format = row_format
        self._longest = longest

    def __getitem__(self, index: int) -> Row:
        row = self._row_format.sample(self._dataset, index)
        if self._longest is not None and (length := self._row_format.num_tokens(row)) > self._longest:
            raise InputError(
                f"`dataset` has {length} tokens in sample {index}, but the model takes at most {self._longest}; set"
                f" `tokenizer.max_seq_len` to {self._longest} or less."
            )
        return row

    def __getattr__(self, name: str) -> Any:  # such as the state of one that has some
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


def is_packed(dataset: Any) -> bool:
    """Whether the rows of ``dataset`` are packed, and so have one length."""
    return isinstance(dataset, PackedDataset) or (isinstance(dataset, ConcatDataset) and dataset.packed)


def check_row_length(seq_len: int, model: nn.Module, *, key: str = "") -> None:
    """Check that ``model`` accepts rows of ``seq_len`` tokens.

    Args:
        key: the key of the config that decides the length; "" if there is none.

    Raises:
        InputError: the model's maximum length is below ``seq_len``.
    """
    longest = longest_row(model)
    if longest is not None and seq_len > longest:
        advice = f"; set `{key}` to {longest} or less" if key else ""
        raise InputError(f"Rows have {seq_len} tokens, but the model takes at most {longest}{advice}.")


def longest_row(model: nn.Module) -> int | None:
    """The most tokens of a row that ``model`` takes; None if that is not known."""
    return getattr(decoder_of(model), "max_seq_len", None)


def decoder_of(model: nn.Module) -> nn.Module:
    """The part of ``model`` that reads tokens: a model with images has a decoder, any other is one."""
    return getattr(model, "decoder", model)


def repeated(tokens: Sequence[Any] | torch.Tensor | np.ndarray, length: int) -> list[Any]:
    """``tokens``, repeated or truncated to ``length``; the token 0 if there are none."""
    values = (tokens.tolist() if isinstance(tokens, torch.Tensor | np.ndarray) else list(tokens)) or [0]
    return (values * (length // len(values) + 1))[:length]


def alike(values: list[Any], example: Any) -> Any:
    """``values`` as a tensor or an array if ``example`` is one, which a `collate_fn` of one's own may rely on.

    >>> alike([1, 2], torch.tensor([7])), alike([1, 2], [7])
    (tensor([1, 2]), [1, 2])
    """
    if isinstance(example, torch.Tensor):
        return example.new_tensor(values)
    return np.array(values, dtype=example.dtype) if isinstance(example, np.ndarray) else values


def _is_column(values: object) -> bool:
    """Whether ``values`` can be those of a row's tokens, one for each."""
    return isinstance(values, list) or (isinstance(values, torch.Tensor | np.ndarray) and values.ndim == 1)

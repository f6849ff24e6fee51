"""The heaviest batches that training can have, for a search.

Another process reads and collates every sample alone, and sends the heaviest ones that it has seen. So the data set,
the collator and the random generators of this process stay as they are.
"""

import contextlib
import copy
import fcntl
import itertools
import logging
import os
import pickle
import stat
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.engine.recovery.columns import named_values
from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.integrations.batches import TrainerBatches
from torchtune_adaptive.integrations.flat_batches import as_rows
from torchtune_adaptive.integrations.late_gathers import with_entries
from torchtune_adaptive.integrations.trainer_batch import IGNORED, TrainerBatch

log = logging.getLogger(__name__)

# How long the other process reads, in a random order. Of slow samples, 6 ms each, it sees 10 000: once in 150 times
# none of the heaviest 0.05 % is among them. Recovery is there for those that are heavier than all it has seen.
_READING_S = 60.0
_TELLING_S = 1.0  # between two words of the other process on how far it is
_STANDARD_ERROR = 2

_ONLY_FIRST_STEP = "The search uses the heaviest rows of the first step, because %s."

Sizes = Counter[tuple[str, str]]


class Sample(NamedTuple):
    """A batch of one sample, and all that memory may follow in it."""

    inputs: Mapping[str, Any]
    sizes: Sizes


class _Seen(NamedTuple):
    """The heaviest samples; how many were read; how many of those failed, and why the first of them did."""

    samples: list[Sample]
    num_read: int
    num_failed: int
    first_failure: str


class WorstBatches:
    """Makes batches of any number of samples, each sample as heavy as any in training.

    Memory may follow the elements of any tensor, the labels that count or the tokens that are no padding. If no sample
    is the heaviest in all of these, there are several batches, and a train step must fit with each.

    Args:
        samples: those that may be the heaviest.
        batch: has what is equal in all batches.
    """

    def __init__(self, samples: Sequence[Sample], batch: TrainerBatch, cutter: TrainerBatches) -> None:
        self._heaviest, self._batch, self._cutter = _heaviest(samples), batch, cutter
        self._padded_ends = _padded_ends(samples)

    def __len__(self) -> int:
        return len(self._heaviest)

    def of(self, num_samples: int, num_batches: int) -> list[TrainerBatch]:
        """Batches of so many samples; the first ones again if there are fewer."""
        batches = [self._batch_of(sample, num_samples) for sample in self._heaviest]
        return [*itertools.islice(itertools.cycle(batches), num_batches)]

    def _batch_of(self, sample: Sample, num_samples: int) -> TrainerBatch:
        """Copies of ``sample``, one of them with padding: rows of one length would need no mask in attention."""
        inputs = self._cutter.repeated(sample.inputs, num_samples)
        for name, end in self._padded_ends.items() if num_samples > 1 else ():
            if name in inputs:
                inputs[name][-1, end] = 0
        return self._batch._replace(inputs=inputs)


def worst_batches(
    loader: Any, batches: Sequence[TrainerBatch], cutter: TrainerBatches, *, shows_progress: bool = False
) -> tuple[WorstBatches, int]:
    """The worst batches, and how many samples a micro-batch can have at most.

    Args:
        loader: of the training. If its samples cannot be indexed or read, those of ``batches`` are used alone.
        batches: those of the first optimizer step.
    """
    data: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    most = cutter.largest_batch(batches)
    samples: list[Sample] = []
    if _is_indexed(data) and collate is not None:
        samples = _seen_elsewhere(_Scan(data, collate, cutter), len(data), shows_progress)
        most = max(most, len(data))
    else:
        log.info(_ONLY_FIRST_STEP, "the data cannot be indexed")
    samples += [one for batch in batches for one in _samples_of(batch.inputs, cutter)]
    return WorstBatches(samples, batches[0], cutter), min(most, cutter.size)


def _is_indexed(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)


def _seen_elsewhere(scan: "_Scan", num_samples: int, shows_progress: bool) -> list[Sample]:
    """The heaviest samples that another process sees; none if it fails. The log says what it has not seen."""
    every_rank_alike = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": every_rank_alike, "multiprocessing_context": "fork", "num_workers": 1}
    options |= {"dataset": scan, "batch_size": None}
    options |= {"timeout": 2 * _READING_S}  # then it hangs
    bar = Bar(desc="reading samples", total=num_samples, leave=False, delay=1, disable=not shows_progress)
    without_threads = with_entries(os.environ, {"TOKENIZERS_PARALLELISM": "false"})  # a fork has not inherited them
    report = b""
    try:
        with bar, without_threads, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # of any fork
            for told in DataLoader(**options):
                if isinstance(told, int):
                    bar.update(told - bar.n)
                else:
                    report = told
    except Exception as error:  # training may have no such error
        error.__traceback__ = None  # whose frames would keep the other process alive
        reason = str(error).strip().split("\n")[-1]  # the text may have the traceback of the other process
        log.info(_ONLY_FIRST_STEP, f"another process cannot read or collate a sample ({reason})")
        return []
    seen: _Seen = pickle.loads(report)
    if seen.num_read < num_samples:
        log.info("The search has read %d of %d samples, for %g s.", seen.num_read, num_samples, _READING_S)
    if seen.num_failed:
        log.info("The search has left out samples (%d of %d): %s.", seen.num_failed, seen.num_read, seen.first_failure)
    return seen.samples


class _Scan(IterableDataset[Any]):
    """Looks at samples, in a process of its own. Yields how many it has read, now and then, and at last a ``_Seen``."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Mapping[str, Any]], cutter: TrainerBatches) -> None:
        self._data, self._collate, self._cutter = data, collate, cutter
        self._largest: Sizes = Counter()
        self._heaviest: dict[Any, tuple[int, Any, Sample]] = {}  # by size: number in the data, as read, as collated
        self._smallest: tuple[int, int, Any] | None = None  # elements, number in the data, as read

    def __iter__(self) -> Iterator[int | bytes]:
        """Pickles the last one. An error if no sample can be read and collated."""
        _detach_files()
        num_read, num_failed, first_error = 0, 0, None
        started = told = time.monotonic()
        for number in torch.randperm(len(self._data)).tolist():
            num_read += 1
            try:
                self._look_at(number)
            except Exception as error:  # of the user's code: training may never have this sample alone
                num_failed, first_error = num_failed + 1, first_error or error
            if (now := time.monotonic()) - started >= _READING_S:
                break
            if now - told >= _TELLING_S:
                told = now
                yield num_read
        if first_error and not self._heaviest:
            raise first_error
        first_failure = reason_of(first_error) if first_error else ""
        yield pickle.dumps(_Seen(self._heaviest_samples(), num_read, num_failed, first_failure))

    def _look_at(self, number: int) -> None:
        read = self._data[number]
        inputs = self._collated_alone(read)
        sizes = _sizes(inputs)
        if any(sizes[name] > self._largest[name] for name in sizes):
            for sample in _samples_of(inputs, self._cutter):
                for name, size in sample.sizes.items():
                    if size > self._largest[name]:
                        self._largest[name], self._heaviest[name] = size, (number, read, sample)
        elements = sum(size for (_, of_what), size in sizes.items() if of_what == "elements")
        if self._smallest is None or elements < self._smallest[0]:
            self._smallest = elements, number, read

    def _heaviest_samples(self) -> list[Sample]:
        """Each as seen alone, and if the collator accepts it, padded as in one batch with the smallest sample."""
        alone = [sample for _, _, sample in self._heaviest.values()]
        together = {number: read for number, read, _ in self._heaviest.values()}
        if self._smallest is not None:
            together[self._smallest[1]] = self._smallest[2]
        with contextlib.suppress(Exception):
            return [*_samples_of(self._collated(together.values()), self._cutter), *alone]
        return alone

    def _collated_alone(self, read: Any) -> Mapping[str, Any]:
        """A batch of one sample; of copies of it if the collator needs several."""
        with contextlib.suppress(Exception):
            return self._collated([read])
        return self._collated([read] * self._cutter.size)

    def _collated(self, read: Iterable[Any]) -> Mapping[str, Any]:
        return as_rows(self._collate([copy.copy(one) for one in read]))  # some collators change their samples


def _detach_files() -> None:
    """Give this process positions of its own in inherited files that it can read, and none of the connections.

    Reading here would otherwise move the positions for the process that trains, or take answers meant for it.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing itself is closed by now
            mode, flags = os.fstat(file).st_mode, fcntl.fcntl(file, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
            if stat.S_ISSOCK(mode):
                os.dup2(nothing, file)
            elif stat.S_ISREG(mode) and not flags & os.O_WRONLY and file > _STANDARD_ERROR:
                own = os.open(f"/proc/self/fd/{file}", flags)
                os.lseek(own, os.lseek(file, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(own, file)
                os.close(own)


def _samples_of(inputs: Mapping[str, Any], cutter: TrainerBatches) -> list[Sample]:
    return [Sample(one, _sizes(one)) for one in cutter.samples_of(inputs)]


def _heaviest(samples: Sequence[Sample]) -> list[Sample]:
    """For each size the sample in which it is the largest; of equal ones, the one that has more of all."""
    names = {name for one in samples for name in one.sizes}
    found = [max(samples, key=lambda one: (one.sizes[name], one.sizes.total())) for name in sorted(names)]
    return list({id(one): one for one in found}.values()) or [samples[0]]


def _sizes(inputs: Mapping[str, Any]) -> Sizes:
    """All that memory may follow: the elements of each tensor, and how many are no padding or ignored labels."""
    sizes: Sizes = Counter()
    for name, tensor in _tensors(inputs):
        sizes[name, "elements"] += tensor.numel()
        if not (tensor.is_floating_point() or tensor.is_complex()):
            sizes[name, "counted"] += int(torch.count_nonzero(tensor != (0 if "mask" in name else IGNORED)))
    return sizes


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors with their names, those of one list with the same."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif (named := named_values(value)) is not None:
        for key, one in named:
            yield from _tensors(one, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one, name)


def _padded_ends(samples: Sequence[Sample]) -> dict[str, int]:
    """The names of attention masks [rows, tokens] that have padding in a batch, and the index of its end."""
    ends = {}
    for one in samples:
        for name, mask in one.inputs.items():
            is_mask = name.endswith("attention_mask") and isinstance(mask, torch.Tensor) and mask.ndim == 2
            if is_mask and not mask.all():
                ends[name] = -1 if mask[:, 0].all() else 0
    return ends

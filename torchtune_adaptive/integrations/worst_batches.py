"""The heaviest batches that training can have, for a search.

A child process reads and collates every sample alone, and returns the heaviest ones that it has seen. So the data set,
the collator and the random generators of the process that trains stay as they are.
"""

import contextlib
import copy
import fcntl
import functools
import itertools
import logging
import multiprocessing
import operator
import os
import pickle
import random
import signal
import stat
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import IterableDataset

from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.engine.recovery.columns import named_values
from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.integrations.batches import IGNORED, TrainerBatch, TrainerBatches

log = logging.getLogger(__name__)

_REPORT_S = 0.1  # between two reports of the child
_SILENCE_S = 120.0  # after which a child without a report is taken to hang

Sizes = Counter[tuple[str, str]]


class Sample(NamedTuple):
    """A sample of a collated batch, by its number, and its sizes."""

    inputs: Mapping[str, Any]
    number: int
    sizes: Sizes


class WorstBatches:
    """Makes batches of any number of samples, each sample as heavy as any in training.

    Memory may follow the elements of any tensor, the labels that count or the tokens that are no padding. If no sample
    is the heaviest in all of these, there are several batches, and a train step must fit with each.

    Args:
        samples: those that may be the heaviest.
        batch: has what is equal in all batches.

    Attributes:
        number: of batches; may be increased, to be equal on all ranks.
    """

    def __init__(self, samples: Sequence[Sample], batch: TrainerBatch, cutter: TrainerBatches) -> None:
        self._heaviest, self._batch, self._cutter = _heaviest(samples), batch, cutter
        self._padded_ends = _padded_ends(samples)
        self.number = len(self._heaviest)

    def of(self, num_samples: int) -> list[TrainerBatch]:
        """The batches of so many samples."""
        batches = []
        for sample in self._heaviest:
            whole = self._batch._replace(inputs=sample.inputs)
            inputs = self._cutter.repeated(whole, sample.number, num_samples).inputs
            if num_samples > 1:
                self._pad_a_row(inputs)
            batches.append(whole._replace(inputs=inputs))
        return [*itertools.islice(itertools.cycle(batches), self.number)]

    def _pad_a_row(self, inputs: Mapping[str, Any]) -> None:
        """Mark a token of the last row as padding: rows of one length alone would need no mask in attention."""
        for name, end in self._padded_ends.items():
            if name in inputs:
                inputs[name][-1, end] = 0


def worst_batches(
    loader: Any, batches: Sequence[TrainerBatch], cutter: TrainerBatches, *, shows_progress: bool
) -> tuple[WorstBatches, int]:
    """The worst batches, and how many samples a micro-batch can have at most.

    Args:
        loader: of the training. If its samples cannot be indexed or read, those of ``batches`` are used alone.
        batches: those of the first optimizer step.
    """
    data: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    one_by_one = copy.copy(cutter)
    one_by_one.size = 1

    def samples_of(inputs: Mapping[str, Any]) -> list[Sample]:
        parts = one_by_one.cut([TrainerBatch(inputs, None, 1)])
        return [Sample(inputs, number, _sizes(part.inputs)) for number, part in enumerate(parts)]

    seen = _Seen([], 0, "the data cannot be indexed")
    most = max(map(cutter.num_rows, batches))
    if _is_indexed(data) and collate is not None:
        seen = _seen_by_child(_Scan(data, collate, samples_of, cutter.size), shows_progress=shows_progress)
        most = max(most, len(data))
    if not seen.samples:
        log.info("The search uses the heaviest rows of the first step, because %s.", seen.reason)
    elif seen.num_failed:
        log.info("The search has left out samples (%d of %d): %s.", seen.num_failed, len(data), seen.reason)
    samples = [*seen.samples, *(one for batch in batches for one in samples_of(batch.inputs))]
    return WorstBatches(samples, batches[0], cutter), min(most, cutter.size)


def _is_indexed(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)


# ---- in the child


class _Seen(NamedTuple):
    """The heaviest samples; how many failed; why the first of them did, or why there are no samples."""

    samples: list[Sample]
    num_failed: int
    reason: str


class _Scan:
    """Looks at all samples.

    Args:
        samples_of: the samples of a collated batch.
        batch_size: samples that every collator accepts.
    """

    def __init__(
        self,
        data: Any,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        samples_of: Callable[[Mapping[str, Any]], list[Sample]],
        batch_size: int,
    ) -> None:
        self._data, self._collate, self._samples_of, self._batch_size = data, collate, samples_of, batch_size
        self.num_samples = len(data)

    def reports(self) -> Iterator[int | _Seen]:
        """Yield how many samples have been read since the last time, and at the end what has been seen."""
        largest: Sizes = Counter()
        found: dict[Any, tuple[int, Any, Sample]] = {}  # number in the data, as read, and as collated
        smallest: tuple[int, int, Any] | None = None  # elements, number in the data, and as read
        num_failed, reason = 0, ""
        reported, reported_at = 0, time.monotonic()
        for number in range(self.num_samples):
            try:
                read = self._data[number]
                inputs = self._collated_alone(read)
                sizes = _sizes(inputs, largest)
                if any(sizes[name] > largest[name] for name in sizes):
                    for sample in self._samples_of(inputs):
                        for name in (one for one in sample.sizes if sample.sizes[one] > largest[one]):
                            largest[name], found[name] = sample.sizes[name], (number, read, sample)
                elements = sum(sizes[name] for name in sizes if "elements" in name)
                if smallest is None or elements < smallest[0]:
                    smallest = elements, number, read
            except Exception as error:  # of the user's code: training may never have this sample alone
                num_failed, reason = num_failed + 1, reason or reason_of(error)
            if time.monotonic() - reported_at > _REPORT_S:
                yield number + 1 - reported
                reported, reported_at = number + 1, time.monotonic()
        yield self.num_samples - reported
        extremes = {number: read for number, read, _ in found.values()}
        if smallest is not None:
            extremes[smallest[1]] = smallest[2]
        alone = {id(sample): sample for _, _, sample in found.values()}.values()
        yield _Seen([*self._collated_together(extremes.values()), *alone], num_failed, reason)

    def _collated_alone(self, read: Any) -> Mapping[str, Any]:
        """A batch of one sample; of copies of it if the collator needs several."""
        with contextlib.suppress(Exception):
            return self._collated([read])
        return self._collated([read] * self._batch_size)

    def _collated_together(self, read: Iterable[Any]) -> list[Sample]:
        """Samples padded as in one batch of training; none if the collator does not accept them."""
        with contextlib.suppress(Exception):
            return self._samples_of(self._collated(read))
        return []

    def _collated(self, read: Iterable[Any]) -> Mapping[str, Any]:
        return self._collate([copy.copy(one) for one in read])  # some collators change their samples


def _report_and_exit(scan: _Scan, sender: Connection) -> NoReturn:
    """Send the pickled reports, the last of them in any case, and end this process."""
    try:
        torch.set_num_threads(1)  # the others were not inherited
        torch.manual_seed(0)
        random.seed(0)  # as on other ranks
        _detach_files()
        for report in scan.reports():
            sender.send_bytes(pickle.dumps(report))
    except BaseException as error:  # this process must not go on to train, whatever happens
        sender.send_bytes(pickle.dumps(_Seen([], 0, reason_of(error))))
    finally:
        os._exit(0)


def _detach_files() -> None:
    """Give this process positions of its own in inherited files that are read, and none of the inherited connections.

    Reading here would otherwise move the positions for the process that trains, or take answers meant for it.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing itself is closed by now
            mode, is_read_only = os.fstat(file).st_mode, fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if stat.S_ISSOCK(mode):
                os.dup2(nothing, file)
            elif stat.S_ISREG(mode) and is_read_only:
                own = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
                os.lseek(own, os.lseek(file, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(own, file)
                os.close(own)


# ---- in the process that trains


def _seen_by_child(scan: _Scan, *, shows_progress: bool) -> _Seen:
    """What a forked process has seen; no samples, and the reason, if it fails."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with receiver, sender:
        try:
            child = _fork()
        except OSError as error:
            return _Seen([], 0, f"no process can be started to read the data ({reason_of(error)})")
        if not child:
            _report_and_exit(scan, sender)
        sender.close()
        try:
            with Bar(
                total=scan.num_samples, desc="looking for the heaviest samples", disable=not shows_progress
            ) as bar:
                seen = _received(receiver, bar)
        finally:
            os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # if the user's own code has waited for it
                os.waitpid(child, 0)
    if not seen.samples and seen.reason:
        return seen._replace(reason=f"another process cannot read or collate a sample ({seen.reason})")
    return seen


def _received(receiver: Connection, bar: Any) -> _Seen:
    while receiver.poll(_SILENCE_S):
        try:
            report = pickle.loads(receiver.recv_bytes())
        except EOFError:
            return _Seen([], 0, "it has ended early")
        if isinstance(report, _Seen):
            return report
        bar.update(report)
    return _Seen([], 0, f"it has not answered for {_SILENCE_S:g} s")


def _fork() -> int:
    """As ``os.fork``. The child does without the threads of tokenizers, which it has not inherited."""
    name, child = "TOKENIZERS_PARALLELISM", -1
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # of any fork
            child = os.fork()
        return child
    finally:
        if child:
            del os.environ[name]
        if child and before is not None:
            os.environ[name] = before


def _heaviest(samples: Sequence[Sample]) -> list[Sample]:
    """The fewest samples, greedily, of which each size has its largest value in one."""
    largest = functools.reduce(operator.or_, (one.sizes for one in samples))
    heaviest: list[Sample] = []
    missing = set(largest)
    while missing or not heaviest:
        reached = [{name for name in missing if one.sizes[name] == largest[name]} for one in samples]
        number = max(range(len(samples)), key=lambda number: len(reached[number]))
        heaviest.append(samples[number])
        missing -= reached[number]
    return heaviest


def _sizes(inputs: Mapping[str, Any], known: Sizes | None = None) -> Sizes:
    """All that memory may follow: the elements of each tensor, and how many are no padding or ignored labels.

    Args:
        known: sizes; what cannot be above them is not counted.
    """
    tensors, sizes, known = [*_tensors(inputs)], Counter(), known or Counter()
    for name, tensor in tensors:
        sizes[name, "elements"] += tensor.numel()
    for name, tensor in tensors:
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        if is_integer and sizes[name, "elements"] > known[name, "counted"]:
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
    for inputs in {id(one.inputs): one.inputs for one in samples}.values():
        for name, mask in inputs.items():
            is_mask = name.endswith("attention_mask") and isinstance(mask, torch.Tensor) and mask.ndim == 2
            if is_mask and not mask.all():
                ends[name] = -1 if mask[:, 0].all() else 0
    return ends

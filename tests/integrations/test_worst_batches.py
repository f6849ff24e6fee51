"""A search's batches are as heavy as any in training, and looking for them changes nothing that training uses."""

import collections
import logging
import os
import pickle
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from torchtune_adaptive.integrations import worst_batches as module
from torchtune_adaptive.integrations.batches import TrainerBatches
from torchtune_adaptive.integrations.trainer_batch import TrainerBatch
from torchtune_adaptive.integrations.worst_batches import worst_batches

Row = dict[str, list[int]]


def row(length: int, num_labels: int | None = None) -> Row:
    labels = length if num_labels is None else num_labels
    return {"ids": [1] * length, "labels": [-100] * (length - labels) + [1] * labels}


def collate(rows: Sequence[Row], *, left: bool = False) -> dict[str, torch.Tensor]:
    longest = max(len(one["ids"]) for one in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        fills = [[value] * (longest - len(one[name])) for one in rows]
        return torch.tensor(
            [[*f, *one[name]] if left else [*one[name], *f] for f, one in zip(fills, rows, strict=True)]
        )

    ids = padded("ids", 0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": padded("labels", -100)}


def found(
    data: Any, collate: Callable[..., Any] = collate, *, size: int = 4, pairs: bool = False, first: Any = None
) -> tuple[list[Mapping[str, Any]], int]:
    """Batches of ``size`` samples, and the most samples."""
    cutter = TrainerBatches(size, rows_per_sample=2 if pairs else 1)
    batches = [TrainerBatch(first or collate([row(3), row(2)]), None, 1)]
    loader = SimpleNamespace(dataset=data, collate_fn=collate)
    worst, most = worst_batches(loader, batches, cutter)
    return [one.inputs for one in worst.of(size, len(worst))], most


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


@pytest.fixture(autouse=True)
def every_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=module.log.name)


# ---- as heavy as training


@pytest.mark.parametrize("first", [None, collate([row(9), row(9)])])
def test_every_row_is_the_longest_and_one_has_padding(first: Any) -> None:
    (batch,), most = found([row(9), row(3), row(5), row(9)], first=first)
    assert batch["input_ids"].tolist() == [[1] * 9] * 4
    assert batch["labels"].tolist() == [[1] * 9] * 4
    assert batch["attention_mask"].tolist() == [[1] * 9] * 3 + [[1] * 8 + [0]]
    assert most == 4


def test_padding_is_where_the_collator_puts_it() -> None:
    (batch,), _ = found([row(3), row(9)], lambda rows: collate(rows, left=True))
    assert batch["attention_mask"].tolist() == [[1] * 9] * 3 + [[0] + [1] * 8]


def test_rows_of_one_length_have_no_padding_as_in_training() -> None:
    (batch,), _ = found([row(9)] * 3, first=collate([row(9)] * 2))
    assert batch["attention_mask"].all()


def test_the_most_labels_may_be_in_a_later_sample_of_the_same_length() -> None:
    (batch,), _ = found([row(8, 5), row(8, 6)])
    assert int((batch["labels"] != -100).sum()) == 4 * 6


def test_the_longest_sample_and_the_one_with_most_labels_are_both_tried_at_the_longest_length() -> None:
    batches, _ = found([row(2), row(20, 1), row(8, 7), row(12, 3)])
    assert [batch["input_ids"].shape for batch in batches] == [(4, 20)] * 2
    assert sorted(int((batch["labels"] != -100).sum()) for batch in batches) == [4 * 1, 4 * 7]
    assert max(int(batch["attention_mask"].sum()) for batch in batches) == 4 * 20 - 1


def test_inputs_and_targets_of_different_samples_are_both_at_their_longest() -> None:
    def both(rows: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        most = [max(sizes) for sizes in zip(*rows, strict=True)]
        return {"input_ids": torch.ones(len(rows), most[0]), "decoder_ids": torch.ones(len(rows), most[1])}

    (batch,), _ = found([(30, 2), (4, 3), (5, 40)], both, first=both([(2, 2)]))
    assert {name: tuple(value.shape) for name, value in batch.items()} == {"input_ids": (4, 30), "decoder_ids": (4, 40)}


def test_images_that_no_batch_can_mix_are_tried_one_size_after_the_other() -> None:
    def images(rows: Sequence[Any]) -> dict[str, torch.Tensor]:
        pixels, patches = zip(*rows, strict=True)
        return {"pixels": torch.stack(pixels), "patches": torch.stack(patches)}

    def image(side: int, patches: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3, side, side), torch.zeros(patches, 2)

    batches, _ = found([image(4, 9), image(8, 2), image(2, 2)], images, first=images([image(2, 2)]))
    shapes = [(tuple(one["pixels"].shape), tuple(one["patches"].shape)) for one in batches]
    assert sorted(shapes) == [((4, 3, 4, 4), (4, 9, 2)), ((4, 3, 8, 8), (4, 2, 2))]


class Encoding(collections.UserDict[str, Any]):
    """Like transformers' own."""


def test_lists_and_nested_values_have_an_entry_per_row() -> None:
    def nested(rows: Sequence[int]) -> Encoding:
        images = [torch.zeros(3, one) for one in rows]
        return Encoding(
            {"text": {"ids": torch.ones(len(rows), max(rows))}, "images": images, "name": "abc", "scale": 2}
        )

    (batch,), _ = found([2, 5, 3], nested, first=nested([2]))
    assert type(batch) is Encoding
    assert batch["text"]["ids"].shape == (4, 5)
    assert [tuple(one.shape) for one in batch["images"]] == [(3, 5)] * 4
    assert (batch["name"], batch["scale"]) == ("abc", 2)


def test_pairs_keep_their_halves() -> None:
    def pairs(rows: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        chosen, rejected = zip(*rows, strict=True)
        batch = collate([*map(row, chosen), *map(row, rejected)])
        return {**batch, "margin": torch.arange(len(rows))}

    batches, _ = found([(2, 9), (3, 4), (7, 1)], pairs, pairs=True, first=pairs([(2, 2)]))
    assert {batch["input_ids"].shape for batch in batches} == {(8, 9)}
    assert {batch["margin"].shape for batch in batches} == {(4,)}
    tokens = [batch["input_ids"].sum(dim=1).tolist() for batch in batches]
    assert [2] * 4 + [9] * 4 in tokens
    assert all(len({*of_batch[:4]}) == len({*of_batch[4:]}) == 1 for of_batch in tokens)


class ShorterWhenReadAgain(list[Row]):
    """As with random crops."""

    def __getitem__(self, number: Any) -> Any:
        one, self[number] = super().__getitem__(number), row(4)
        return one


def test_a_sample_stays_as_it_was_seen_if_reading_it_again_gives_another() -> None:
    assert found(ShorterWhenReadAgain([row(5), row(55), row(25)]))[0][0]["input_ids"].shape == (4, 55)


def test_a_sample_stays_as_it_was_seen_if_collating_it_again_gives_another() -> None:
    calls = collections.Counter[int]()

    def cropping(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        length = len(rows[0]["ids"])
        calls[length] += 1
        return collate([row(length) if calls[length] == 1 else row(2) for _ in rows])

    assert found([row(3), row(30), row(7)], cropping)[0][0]["input_ids"].shape == (4, 30)


def test_padding_that_only_whole_batches_have_is_seen_in_the_first_step() -> None:
    def to_a_multiple(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        return collate([*rows, row(16)] if len(rows) > 1 else rows)

    (batch,), _ = found([row(3), row(3)], collate, first=to_a_multiple([row(3), row(3)]))
    assert batch["input_ids"].shape == (4, 16)


@pytest.mark.parametrize(("rows", "size", "most"), [(20, 32, 20), (40, 32, 32), (1, 1, 1)])
def test_no_more_samples_are_tried_than_there_are(rows: int, size: int, most: int) -> None:
    assert found([row(3)] * rows, size=size, first=collate([row(3)]))[1] == most


def test_more_batches_can_be_made_to_have_as_many_on_all_ranks() -> None:
    loader = SimpleNamespace(dataset=[row(9), row(3)], collate_fn=collate)
    first = [TrainerBatch(collate([row(3)]), None, 1)]
    worst, _ = worst_batches(loader, first, TrainerBatches(4))
    assert len(worst) == 1
    assert [one.inputs["input_ids"].shape for one in worst.of(2, 3)] == [(2, 9)] * 3


def test_reading_ends_after_a_while_and_has_seen_rows_from_anywhere(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_READING_S", 0.0)
    ((batch,), most) = found([row(length) for length in range(10, 50)], size=64)
    assert 10 < batch["input_ids"].shape[1] < 49
    assert most == 40
    assert texts(caplog) == ["The search has read 1 of 40 samples, for 0 s."]


class ShownBar:
    """Stands for a progress bar."""

    n = 0

    def __init__(self, *, total: int, **_: Any) -> None:
        self.total, self.shown = total, list[int]()

    def __enter__(self) -> "ShownBar":
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, more: int) -> None:
        self.n += more
        self.shown.append(self.n)


def test_reading_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[ShownBar] = []
    monkeypatch.setattr(module, "Bar", lambda **options: bars.append(ShownBar(**options)) or bars[-1])
    monkeypatch.setattr(module, "_TELLING_S", 0.0)
    found([row(3)] * 4)
    assert [(bar.total, bar.shown[:4]) for bar in bars] == [(4, [1, 2, 3, 4])]


# ---- no trace


class Stateful:
    """Data and a collator with state of all kinds."""

    def __init__(self) -> None:
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(2)
        self.calls, self.cache = 0, {}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Row:
        self.calls += 1
        random.random()
        return self.cache.setdefault(number, row(self.python.randint(2, 9)))

    def collate(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        self.calls += 1
        torch.rand(1 + int(torch.randint(2, (1,), generator=self.torch)))
        for one in rows:
            one["ids"].append(1)
            one["labels"].append(1)
        return collate(rows)

    def state(self) -> bytes:
        generators = self.torch.get_state().tolist(), self.python.getstate()
        everywhere = torch.get_rng_state().tolist(), random.getstate()
        return pickle.dumps((generators, everywhere, self.calls, self.cache))


def test_data_collator_and_generators_stay_as_they_are() -> None:
    one = Stateful()
    first, before = collate([row(2)]), one.state()
    (batch, *_), _ = found(one, one.collate, first=first)
    assert one.state() == before
    assert batch["input_ids"].shape[1] > 2


@pytest.mark.parametrize("mode", ["rb", "r+b"])
def test_files_and_connections_of_the_data_stay_where_they_are(mode: str, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("".join(f"{number}\n" for number in range(3, 5000)))
    one, other = socket.socketpair()
    one.setblocking(False)
    other.send(b"for training")
    with one, other, (tmp_path / "rows").open(mode, buffering=0) as file:

        class NextLine(list[None]):
            def __getitem__(self, number: Any) -> Any:
                try:
                    one.recv(100)
                except OSError:
                    return row(int(file.readline()))
                raise AssertionError("took what is for the training")

        file.readline()
        assert found(NextLine([None] * 50))[0][0]["input_ids"].shape == (4, 53)
        assert file.readline() == b"4\n"
        assert one.recv(100) == b"for training"


@pytest.mark.parametrize("setting", [None, "true"])
def test_the_environment_and_the_samples_stay_as_they_are(setting: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", setting or "")
    if setting is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    seen = [row(9, 1), row(5), row(3)]

    def popping(rows: list[Any]) -> dict[str, torch.Tensor]:
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
        return collate([{"ids": one.pop("ids"), "labels": one.pop("labels")} for one in rows])

    batches, _ = found(seen, popping, first=collate([row(2)]))
    assert [batch["input_ids"].shape for batch in batches] == [(4, 9)] * 2
    assert seen == [row(9, 1), row(5), row(3)]
    assert os.environ.get("TOKENIZERS_PARALLELISM") == setting


class RandomLengths(list[None]):
    def __getitem__(self, number: Any) -> Any:
        return row(random.randint(1, 10**4) + int(torch.randint(10**4, (1,))))


def test_looking_again_and_on_other_ranks_finds_the_same() -> None:
    lengths = set()
    for seed in range(3):
        torch.manual_seed(seed)
        random.seed(seed)
        lengths.add(found(RandomLengths([None] * 8))[0][0]["input_ids"].shape)
    assert len(lengths) == 1


# ---- what training survives


class Broken(list[Any]):
    """Samples, errors that are raised instead, and functions that are called instead."""

    def __getitem__(self, number: Any) -> Any:
        one = super().__getitem__(number)
        if isinstance(one, BaseException):
            raise one
        return one() if callable(one) else one


def test_samples_that_cannot_be_collated_alone_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    data = Broken([row(3), None, OSError("a broken file"), row(7)])
    (batch,), _ = found(data, lambda rows: collate([one for one in rows if one is not None]))
    assert batch["input_ids"].shape == (4, 7)
    (text,) = texts(caplog)
    assert text.startswith(
        "The search has left out samples (2 of 4): OSError: a broken file"
    )  # the first that was read


@pytest.mark.parametrize("needed", [2, 4])
def test_a_collator_may_need_several_samples(needed: int, caplog: pytest.LogCaptureFixture) -> None:
    def mixing(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        assert len(rows) % needed == 0
        return collate(rows)

    (batch,), _ = found([row(3), row(7), row(5)], mixing, first=collate([row(3)]))
    assert batch["input_ids"].tolist() == [[1] * 7] * 4
    assert texts(caplog) == []


def test_a_collator_may_make_several_rows_of_a_sample() -> None:
    def windows(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        return collate([row(4) if start else row(4, 2) for one in rows for start in range(0, len(one["ids"]), 4)])

    (batch,), _ = found([row(8), row(12)], windows)
    assert batch["labels"].tolist() == [[1] * 4] * 4


class Stream(IterableDataset[Row]):
    def __iter__(self) -> Iterator[Row]:
        yield row(3)


def unpicklable(rows: Sequence[Row]) -> dict[str, Any]:
    return {**collate(rows), "function": lambda: None}


HANGS = Broken([lambda: time.sleep(3600)])
NOT_INDEXED, NOT_READ = "the data cannot be indexed", "another process cannot read or collate a sample "
NOT_PICKLED = "get" if sys.version_info >= (3, 13) else "pickle"  # in words of Python


@pytest.mark.parametrize(
    ("data", "collate_fn", "reason"),
    [
        (Stream(), collate, NOT_INDEXED),
        (None, collate, NOT_INDEXED),
        ([row(3)], None, NOT_INDEXED),
        (Broken([RuntimeError("Cannot re-initialize CUDA")]), collate, f"{NOT_READ}(RuntimeError: Cannot re-init"),
        ([row(3)], unpicklable, f"{NOT_READ}(AttributeError: Can't {NOT_PICKLED} local"),
        (Broken([lambda: os._exit(3)]), collate, f"{NOT_READ}(DataLoader worker (pid"),
        (Broken([SystemExit(3)]), collate, f"{NOT_READ}(DataLoader worker (pid"),
        (HANGS, collate, f"{NOT_READ}(DataLoader timed out"),
    ],
)
def test_without_a_look_at_the_data_the_first_step_is_used(
    data: Any, collate_fn: Any, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if data is HANGS:
        monkeypatch.setattr(module, "_READING_S", 0.05)
        monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # s, then torch ends the process
    children: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])
    (batch,), most = found(data, collate_fn, first=collate([row(2), row(6), row(4)]))
    assert batch["input_ids"].tolist() == [[1] * 6] * 4
    assert batch["attention_mask"].tolist() == [[1] * 6] * 3 + [[1] * 5 + [0]]
    assert most == 3
    (text,) = texts(caplog)
    assert text.startswith(f"The search uses the heaviest rows of the first step, because {reason}")
    for child in children:
        with suppress(ProcessLookupError):  # it has ended
            assert wait([os.pidfd_open(child)], timeout=60)


def test_a_machine_that_cannot_fork_uses_the_first_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", fails)
    (batch,), _ = found([row(9)], first=collate([row(5)]))
    assert batch["input_ids"].shape == (4, 5)
    assert "([Errno 12] Cannot allocate memory)" in texts(caplog)[0]

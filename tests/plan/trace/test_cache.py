"""A traced step is read from a file as long as nothing that it depends on has changed."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.support.plans import GIB, MIB, rows_of, step_of
from torchtune_adaptive.plan.trace import cache, config_steps
from torchtune_adaptive.plan.trace.cache import user_cache_folder
from torchtune_adaptive.plan.trace.step_events import TracedStep
from torchtune_adaptive.plan.trace.tracer import Tracer

CONFIG = OmegaConf.create({"model": {"_component_": "torchtune.models.llama2.llama2_7b"}, "batch_size": 2})
OF_OTHERS = OmegaConf.create({"model": [{"_component_": "mine.Model"}]})


class Tracing:
    """In place of ``trace_config``: counts how often it is asked; peaks differ each time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, cfg: DictConfig, *, seq_lens: list[int], **_: Any) -> TracedStep:
        self.count += 1
        return step_of(*(rows_of(one, held_bytes=GIB, bytes_per_row=self.count * MIB) for one in seq_lens))


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Tracing:
    tracing = Tracing()
    monkeypatch.setattr(config_steps, "trace_config", tracing)
    return tracing


def asked_by_new_processes(folder: Path, *configs: DictConfig, world_sizes: tuple[int, ...] = (1,)) -> None:
    """Ask for a step with a tracer for each request, as new processes do."""
    for cfg in configs:
        for world_size in world_sizes:
            Tracer(folder).step(cfg, world_size=world_size, seq_lens=[64])


def test_the_same_request_is_traced_once_and_has_the_same_answer(tracing: Tracing, tmp_path: Path) -> None:
    first, again = (Tracer(tmp_path).step(CONFIG, world_size=1, seq_lens=[64]) for _ in range(2))
    assert (tracing.count, first) == (1, again)
    asked_by_new_processes(tmp_path, DictConfig(CONFIG | {"compile": True}), CONFIG, world_sizes=(1, 2))
    assert tracing.count == 4  # another config, and another number of ranks


def test_of_several_lengths_only_the_new_ones_are_traced(tracing: Tracing, tmp_path: Path) -> None:
    asked_by_new_processes(tmp_path, CONFIG)
    lengths = [65, 64, 66]
    step = Tracer(tmp_path).step(CONFIG, world_size=1, seq_lens=lengths)
    assert tracing.count == 2
    assert [one.seq_len for one in step.lengths] == lengths
    assert [one.at(1)[1].num_bytes for one in step.lengths] == [2 * MIB, MIB, 2 * MIB]


def test_other_versions_are_traced_again(tracing: Tracing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_by_new_processes(tmp_path, CONFIG)
    monkeypatch.setattr(cache, "_versions", lambda: ["another"])
    asked_by_new_processes(tmp_path, CONFIG, CONFIG)
    assert tracing.count == 2


def test_a_component_of_another_package_is_traced_once_per_process(tracing: Tracing, tmp_path: Path) -> None:
    asked_by_new_processes(tmp_path, OF_OTHERS, OF_OTHERS)
    assert tracing.count == 2
    tracer = Tracer(tmp_path)
    for _ in range(2):
        tracer.step(OF_OTHERS, world_size=1, seq_lens=[64])
    assert tracing.count == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda content: b'{"lengths": 3}',
        lambda content: gzip.compress(b'{"lengths": 3}'),
        lambda content: content[:-20],
        lambda content: content[:30] + bytes(30) + content[60:],
    ],
    ids=["no gzip", "something else", "cut", "changed"],
)
def test_a_file_that_cannot_be_read_is_ignored(
    spoilt: Callable[[bytes], bytes], tracing: Tracing, tmp_path: Path
) -> None:
    asked_by_new_processes(tmp_path, CONFIG)
    (path,) = tmp_path.iterdir()
    path.write_bytes(spoilt(path.read_bytes()))
    asked_by_new_processes(tmp_path, CONFIG)
    assert tracing.count == 2


def test_a_folder_that_cannot_be_written_gives_one_warning(
    tracing: Tracing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "plans"
    tracer = Tracer(folder)
    for seq_len in (64, 128):
        tracer.step(CONFIG, world_size=1, seq_lens=[seq_len])
    assert tracing.count == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"What was traced cannot be kept for the next plan: [Errno 20] Not a directory: '{folder}'"
    ]


def test_only_the_newest_files_are_kept(tracing: Tracing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST_FILES", 2)
    asked_by_new_processes(tmp_path, CONFIG)
    (oldest,) = tmp_path.iterdir()
    os.utime(oldest, (0, 0))
    asked_by_new_processes(tmp_path, CONFIG, world_sizes=(2, 3))
    assert len(list(tmp_path.iterdir())) == 2
    assert not oldest.exists()


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder("plans") == tmp_path / "torchtune_adaptive" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert user_cache_folder("plans") == Path.home() / ".cache" / "torchtune_adaptive" / "plans"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, and a user unknown to the system
    assert user_cache_folder("plans") is None

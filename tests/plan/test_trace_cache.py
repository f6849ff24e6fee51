"""A traced step is read from a file as long as nothing that it depends on has changed."""

import gzip
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.support.plans import GIB, MIB, peaks, step_of
from tests.support.step_events import EVENTS
from torchtune_adaptive.plan import cache, trace_cache
from torchtune_adaptive.plan.cache import user_cache_folder
from torchtune_adaptive.plan.trace_cache import EventsCache, TraceCache

CONFIG = OmegaConf.create({"model": {"_component_": "torchtune.models.llama2.llama2_7b"}, "batch_size": 2})


class Tracing:
    """Counts how often it is asked to trace; answers with a step's peaks, which differ each time, or its events."""

    def __init__(self, *, events: bool = False) -> None:
        self.count = 0
        self._events = events

    def __call__(self, cfg: DictConfig, **_: Any) -> Any:
        self.count += 1
        return EVENTS if self._events else step_of(peaks(64, held_bytes=GIB, bytes_per_row=self.count * MIB))


def asked_by_new_processes(folder: Path, *configs: DictConfig, world_sizes: tuple[int, ...] = (1,)) -> int:
    """How often a step is traced if each request has its own cache, as in a new process."""
    tracing = Tracing()
    for cfg in configs:
        for world_size in world_sizes:
            TraceCache(tracing, folder)(cfg, world_size=world_size, seq_lens=[64])
    return tracing.count


def test_the_same_request_is_traced_once_and_has_the_same_answer(tmp_path: Path) -> None:
    tracing = Tracing()
    first, again = (TraceCache(tracing, tmp_path)(CONFIG, world_size=1, seq_lens=[64]) for _ in range(2))
    assert (tracing.count, first) == (1, again)


def test_another_config_length_or_number_of_ranks_is_traced_again(tmp_path: Path) -> None:
    other = OmegaConf.merge(CONFIG, {"compile": True})
    assert isinstance(other, DictConfig)
    assert asked_by_new_processes(tmp_path, CONFIG, other, CONFIG, world_sizes=(1, 2)) == 4
    tracing = Tracing()
    TraceCache(tracing, tmp_path)(CONFIG, world_size=1, seq_lens=[64, 65])
    assert tracing.count == 1


def test_other_versions_are_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_by_new_processes(tmp_path, CONFIG, CONFIG) == 1
    monkeypatch.setattr(cache, "_versions", lambda: ["another"])
    assert asked_by_new_processes(tmp_path, CONFIG, CONFIG) == 1


def test_a_component_of_another_package_is_traced_once_per_process(tmp_path: Path) -> None:
    cfg = OmegaConf.create({"blocks": [{"_component_": "mine.Model"}]})
    assert asked_by_new_processes(tmp_path, cfg, cfg) == 2
    tracing = Tracing()
    cache = TraceCache(tracing, tmp_path)
    for _ in range(2):
        cache(cfg, world_size=1, seq_lens=[64])
    assert tracing.count == 1
    assert list(tmp_path.iterdir()) == []


def _damage(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_text('{"peaks": 3}')


def _put_a_file_in_its_place(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("")


@pytest.mark.parametrize("spoil", [_damage, _put_a_file_in_its_place])
def test_a_file_that_cannot_be_read_or_written_is_ignored(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    assert asked_by_new_processes(folder, CONFIG) == 1
    spoil(folder)
    assert asked_by_new_processes(folder, CONFIG) == 1


def test_only_the_newest_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "_KEPT_FILES", 2)
    asked_by_new_processes(tmp_path, CONFIG)
    (oldest,) = tmp_path.iterdir()
    os.utime(oldest, (0, 0))
    asked_by_new_processes(tmp_path, CONFIG, world_sizes=(2, 3))
    assert len(list(tmp_path.iterdir())) == 2
    assert not oldest.exists()


def _events_asked(folder: Path, *batch_sizes: int, cfg: DictConfig = CONFIG) -> int:
    """How often events are traced if each batch size has its own cache, as in a new process."""
    tracing = Tracing(events=True)
    for batch_size in batch_sizes:
        assert EventsCache(tracing, folder)(cfg, world_size=1, batch_size=batch_size, seq_len=64) == EVENTS
    return tracing.count


def test_a_steps_events_are_kept_beside_its_peaks(tmp_path: Path) -> None:
    assert asked_by_new_processes(tmp_path, CONFIG) == 1
    assert _events_asked(tmp_path, 2, 3, 2) == 2
    assert asked_by_new_processes(tmp_path, CONFIG) == 0
    assert _events_asked(tmp_path, 2, 2, cfg=OmegaConf.create({"model": {"_component_": "mine.Model"}})) == 2


@pytest.mark.parametrize("spoiled", ["short", "changed", "other"])
def test_events_that_cannot_be_read_are_traced_again(spoiled: str, tmp_path: Path) -> None:
    _events_asked(tmp_path, 2)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    changed = whole[:30] + bytes(30) + whole[60:]
    other = gzip.compress(b'{"batch_size": 1, "seq_len": 1, "names": [], "operations": [[0, 0, 0]], "allocations": []}')
    path.write_bytes({"short": whole[:-20], "changed": changed, "other": other}[spoiled])
    assert _events_asked(tmp_path, 2, 2) == 1


def test_only_the_newest_events_are_kept_and_peaks_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_by_new_processes(tmp_path, CONFIG)
    monkeypatch.setattr(trace_cache, "_KEPT_EVENTS", 2)
    _events_asked(tmp_path, 1, 2, 3)
    assert len(list(tmp_path.iterdir())) == 3
    assert asked_by_new_processes(tmp_path, CONFIG) == 0


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder("plans") == tmp_path / "torchtune_adaptive" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert user_cache_folder("plans") == Path.home() / ".cache" / "torchtune_adaptive" / "plans"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, and a user unknown to the system
    assert user_cache_folder("plans") == Path(tempfile.gettempdir()) / "torchtune_adaptive" / "plans"

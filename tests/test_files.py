"""A file is written whole or not at all."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.full_disk import FullDisk
from torchtune_adaptive.files import check_writable, write_atomically


def test_writing_again_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.json"
    assert [write_atomically(path, text) for text in ("first", "second")] == [path, path]
    assert path.read_text() == "second"
    assert list(path.parent.iterdir()) == [path]
    assert write_atomically(path, b"\r\n\xff").read_bytes() == b"\r\n\xff"


def test_a_path_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    former = write_atomically(tmp_path / "former", "text")
    check_writable(former)
    check_writable(tmp_path / "new" / "file")
    assert former.read_text() == "text"
    assert list(tmp_path.iterdir()) == [former]


@pytest.mark.parametrize("name", [".", "former/new/file", "pipe", "x" * 300, "a\0b"])
def test_a_path_that_cannot_be_written_is_refused_and_left_as_it_is(name: str, tmp_path: Path) -> None:
    write_atomically(tmp_path / "former", "text")
    os.mkfifo(tmp_path / "pipe")  # which stands for a device
    before = sorted(tmp_path.iterdir())
    with pytest.raises((OSError, ValueError)):
        check_writable(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_former_file_whole(call: str, tmp_path: Path) -> None:
    path = write_atomically(tmp_path / "state.json", "former")
    with FullDisk(os, call), pytest.raises(OSError, match="No space left"):
        write_atomically(path, "latter")
    assert path.read_text() == "former"


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomically(tmp_path / "state.json", "former")
    seen: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        seen.append(("synced", Path(f"/proc/self/fd/{descriptor}").read_text()))
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        seen.append(("replaced", path.read_text()))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_atomically(path, "latter")
    assert seen == [("synced", "latter"), ("replaced", "former")]


def _write_often(path: Path, letter: str) -> None:
    for _ in range(20):
        write_atomically(path, letter * 100_000)


def test_a_file_is_whole_although_several_write_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(_write_often, path, letter) for letter in "abcdefgh"]
        while not all(writer.done() for writer in writers):
            if path.exists():
                text = path.read_text()
                assert (len(text), len(set(text))) == (100_000, 1)
        assert [writer.result() for writer in writers] == [None] * 8
    assert list(tmp_path.iterdir()) == [path]

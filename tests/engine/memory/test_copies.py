"""Copies of tensors restore their bytes; if the file on disk fails, the copies are kept in memory."""

import errno
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchtune_adaptive.engine.memory import copies
from torchtune_adaptive.engine.memory.copies import Copies
from torchtune_adaptive.engine.memory.resident import anonymous_bytes

MIB = 2**20

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(3, 5),
    "transposed": lambda: torch.randn(3, 5).t(),
    "every second column": lambda: torch.randn(3, 10)[:, ::2],
    "a scalar": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0),
    "bfloat16": lambda: torch.randn(7).bfloat16(),
    "float8": lambda: torch.randn(7).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(7, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(7, dtype=torch.complex64).conj(),
    "booleans": lambda: torch.tensor([True, False, True]),
    "NaN and minus zero": lambda: torch.tensor([float("nan"), -0.0]),
}


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_SMALLEST_FILE_BYTES", 1)
    copies._log_memory.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def overwrite_and_restore(tensor: torch.Tensor) -> None:
    with Copies([tensor]) as kept:
        restore = kept.copy(tensor)
        tensor.zero_()
        restore()


def assert_kept_in_memory(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Tensors of 32, 56 and 8 bytes are restored, and one line says why their copies are not on disk."""
    tensors = [torch.randn(8), torch.randn(14), torch.randn(2)]
    before = list(map(bits, tensors))
    with caplog.at_level(logging.WARNING), Copies(tensors) as kept:
        restores = [kept.copy(tensor) for tensor in tensors]
        for tensor, restore in zip(tensors, restores, strict=True):
            tensor.zero_()
            restore()
    assert list(map(bits, tensors)) == before
    [line] = [record.getMessage() for record in caplog.records]
    assert "in memory instead of on disk" in line
    assert reason in line


@pytest.mark.parametrize("in_file", [True, False], ids=["in a file", "in memory"])
def test_copies_restore_every_bit_in_any_order_also_where_memory_has_moved(
    in_file: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path if in_file else tmp_path / "gone"))
    tensors = [make() for make in TENSORS.values()]
    before = dict(zip(TENSORS, map(bits, tensors), strict=True))
    with Copies(tensors) as kept:
        restores = [kept.copy(tensor) for tensor in tensors]
        tensors[0].data = torch.zeros(3, 5)  # FSDP2 moves parameters that it pads in the first forward
        for in_order in (restores, restores[::-1]):
            for tensor in tensors:
                tensor.zero_()
            for restore in in_order:
                restore()
            assert dict(zip(TENSORS, map(bits, tensors), strict=True)) == before


def test_copies_of_cpu_tensors_need_no_host_memory_and_their_file_has_no_name(folder: Path) -> None:
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    before = anonymous_bytes() or 0
    with Copies([tensor]) as kept:
        restore = kept.copy(tensor)
        assert 0 < (anonymous_bytes() or 0) < before + 16 * MIB
        assert kept._file is not None
        assert list(folder.iterdir()) == []
        restore()


def test_a_graph_that_used_a_restored_tensor_is_refused_as_after_any_write() -> None:
    weight = torch.ones(3, requires_grad=True)
    with Copies([weight]) as kept:
        restore = kept.copy(weight)
        loss = weight.square().sum()
        restore()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_folder_that_is_gone_or_without_space_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room, raising=False)
    monkeypatch.setattr(os, "pwrite", None)  # which would fail
    assert_kept_in_memory(caplog, "No space left on device")
    caplog.clear()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "gone"))
    assert_kept_in_memory(caplog, "No such file or directory")


def test_a_disk_that_gets_full_while_it_is_written_leaves_the_rest_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    write, room = os.pwrite, [40]

    def write_while_there_is_room(descriptor: int, values: memoryview, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, values[: room[0]], offset)
        room[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", write_while_there_is_room)
    assert_kept_in_memory(caplog, "No space left on device")


def test_a_file_cut_short_by_another_is_an_error(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    tensor = torch.ones(8)
    with Copies([tensor]) as kept:
        restore = kept.copy(tensor)
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(OSError, match="no longer in its file"):
            restore()


def test_a_short_read_is_continued(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    tensor, read = torch.randn(100), os.preadv
    before = bits(tensor)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: read(file, [buffers[0][:7]], offset))
    overwrite_and_restore(tensor)
    assert bits(tensor) == before


def test_a_few_bytes_are_kept_in_memory_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(copies, "_SMALLEST_FILE_BYTES", 33)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    tensor = torch.ones(8)
    with caplog.at_level(logging.WARNING):
        overwrite_and_restore(tensor)
    assert tensor.tolist() == [1.0] * 8
    assert not caplog.records


def test_a_copy_on_disk_needs_no_numpy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", refuse)
    tensor = torch.arange(6.0)
    overwrite_and_restore(tensor)
    assert torch.equal(tensor, torch.arange(6.0))

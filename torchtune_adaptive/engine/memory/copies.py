"""Copies of tensors outside of the memory that probes measure: GPU tensors to host memory, host tensors to a file.

The file is an unnamed temporary file in the folder of Python's ``tempfile`` (``TMPDIR``). It disappears however the
process ends. It is written and read, not memory-mapped, so a full disk is an error, not a signal that ends the process.
The file's pages in the page cache count in a container's limit, but the kernel drops them when memory gets short.
"""

import ctypes
import errno
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from functools import partial

import torch

from torchtune_adaptive.engine.memory.operations import can_be_written, plain_parts
from torchtune_adaptive.errors import reason_of

Restore = Callable[[], None]
_Fill = Callable[[torch.Tensor], None]  # writes a copy into a tensor of the same shape

_SMALLEST_FILE_BYTES = 2**20  # too few bytes to affect a search, such as step counters of a GPU's optimizer

log = logging.getLogger(__name__)


class Copies:
    """Copies tensors, which can be restored within ``with copies:``.

    Args:
        tensors: all tensors that will be copied. If the disk is too small, they are copied to memory, with a log line.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        parts = [part for tensor in tensors for part in _written_parts(tensor)]
        file_bytes = sum(part.nbytes for part in parts if _has_bytes_on_host(part))
        self._file: _TensorFile | None = None
        if file_bytes >= _SMALLEST_FILE_BYTES:
            try:
                self._file = _TensorFile(file_bytes)
            except OSError as error:
                _log_memory(reason_of(error))

    def copy(self, tensor: torch.Tensor) -> Restore:
        """Copy ``tensor`` and return a function that restores it, bit for bit, also if its memory has moved.

        A wrapper tensor is copied part by part, because its own copy may share memory with the original. FSDP2 moves
        parameters in the first forward pass: with torch 2.9 all padded ones.
        """
        fills = [(part.shape, self._copy_part(part.detach())) for part in _written_parts(tensor)]

        def restore() -> None:
            for part, (shape, fill) in zip(_written_parts(tensor), fills, strict=True):
                if part.shape != shape:
                    part.resize_(shape)
                fill(part.detach())

        return restore

    def __enter__(self) -> "Copies":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _copy_part(self, part: torch.Tensor) -> _Fill:
        if self._file is not None and _has_bytes_on_host(part):
            try:
                return self._file.write(part)
            except OSError as error:
                _log_memory(reason_of(error))
        on_host = part.to("cpu", copy=True)

        @torch.no_grad()
        def fill(tensor: torch.Tensor) -> None:
            tensor.copy_(on_host)

        return fill


@functools.cache  # log each reason once
def _log_memory(reason: str) -> None:
    log.warning(
        f"Copies of model and optimizer are kept in memory instead of on disk: {reason}."
        " Set TMPDIR to use another folder."
    )


class _TensorFile:
    """Host tensors of ``nbytes`` in an unnamed temporary file.

    Raises:
        OSError: its folder cannot be written to, or has no space for ``nbytes``.
    """

    def __init__(self, nbytes: int) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - `close` is the caller's
        self._end = 0
        try:
            if hasattr(os, "posix_fallocate"):  # reserve the space, because ranks share the disk
                os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError:
            self._file.close()
            raise

    def write(self, tensor: torch.Tensor) -> _Fill:
        """Write ``tensor``, and return a function that reads it into a tensor of the same shape.

        Raises:
            OSError: the file cannot be written. The returned function raises it if the file cannot be read.
        """
        whole = tensor.contiguous()
        start, values = self._end, _bytes_of(whole)
        while values:
            written = os.pwrite(self._file.fileno(), values, self._end)
            self._end, values = self._end + written, values[written:]
        return partial(self._read, start)

    def close(self) -> None:
        self._file.close()

    @torch.no_grad()
    def _read(self, start: int, tensor: torch.Tensor) -> None:
        whole = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        values = _bytes_of(whole)
        while values:
            read = os.preadv(self._file.fileno(), [values], start)
            if not read:
                raise OSError(errno.EIO, "a copy of a tensor is no longer in its file")
            start, values = start + read, values[read:]
        if whole is tensor:
            torch.autograd.graph.increment_version(tensor)  # the read is not an operation that autograd sees
        else:
            tensor.copy_(whole)


def _written_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors in ``tensor`` that a step may write to."""
    return list(filter(can_be_written, plain_parts(tensor)))


def _has_bytes_on_host(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a plain tensor in host memory."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not (tensor.is_quantized or lazy)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor as bytes, without a copy, while the tensor lives. Needs no NumPy."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))

"""The memory overhead of a GPU, beside the live bytes that a trace counts.

    reserved by the allocator = (traced + workspaces + scratch per token) * (1 + fragmentation)
    used on the GPU           = outside the allocator (CUDA context, NCCL) + reserved

The constants are for a GPU without a calibration. They are published measurements, each with its source, or estimates
where a comment says so. None was measured for this project. ``tune-adaptive calibrate`` replaces them.
"""

import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torchtune_adaptive.errors import InputError, is_number, quote, reason_of, require_integer
from torchtune_adaptive.files import write_whole

_MIB = 2**20
CALIBRATION_VERSION = 1

# CUDA context and the kernels loaded into it. A new context takes 426 MiB (RTX 6000 Ada, torch 2.10 for CUDA 13:
# github.com/unslothai/unsloth-zoo/pull/1053) or 616 MiB (github.com/LMCache/LMCache/issues/4019). It grows when kernels
# are loaded at their first use. No source says by how much: 152 MiB above the larger figure is an estimate.
CONTEXT_BYTES = 768 * _MIB
# A communicator of a single rank: NCCL 2.28 on B300 allocates 536870912 bytes at the first collective
# (github.com/NVIDIA/nccl/issues/2363). A recipe with a single process creates such a group too.
ONE_RANK_NCCL_BYTES = 512 * _MIB
# A communicator of more ranks: 544 to 688 MiB on four A100 (github.com/NVIDIA/nccl/issues/964); about 1.6 GB, which
# seems to be the whole process (github.com/NVIDIA/nccl/issues/864). An estimate between the two, for one
# group; more groups take more.
NCCL_BYTES = 1024 * _MIB
# Memory outside the allocator on one of several AMD GPUs, mostly RCCL: processes of 13.6 to 14.0 GB, less
# 5.65 GiB reserved, on 8 MI355X ("OTel" in benchmarks/published_gpu.json): 7.0 to 7.4 GiB. Of a single one nothing is
# known.
OUTSIDE_BYTES_ON_AMD = 7424 * _MIB
# cuBLAS: 8.125 MiB, but 32 MiB on compute capability 9 and, depending on torch's version, 10 and 12
# (CublasHandlePool.cpp; github.com/pytorch/pytorch/pull/175344 and 182669). cublasLt: at most as much, in its own
# buffer (ATen/cuda/CUDAContextLight.h of 2.13). Each thread has both, and backward is a second thread: 4 times the
# largest.
WORKSPACE_BYTES = 4 * 32 * _MIB
# Flash attention's backward: float32 accumulators [B, S, heads, head_dim] for the queries' gradient and [B, heads, S]
# for the softmax, with S rounded up to a multiple of 128 (aten/src/ATen/native/transformers/cuda/flash_attn/
# flash_api.cpp). That is 4 * heads * (head_dim + 1) bytes for each token, and head_dim is at least 32. Deterministic
# algorithms take more.
SCRATCH_BYTES_PER_TOKEN_AND_WIDTH = 4 * (1 + 1 / 32)
# Bytes reserved above those allocated. One rank: 3.9 % (1B LoRA on A100), 15.3 % (0.5B LoRA on MI355X), 14.2 %
# (github.com/meta-pytorch/torchtune/pull/527). Several ranks: 23.0 % (0.5B LoRA under FSDP2 on 8 MI355X), 26 to 35 %
# under FSDP1 on A100 (github.com/meta-llama/llama-cookbook/pull/41 and 165), which frees memory less predictably.
# Further addresses are in benchmarks/published_gpu.json. With expandable segments it is an estimate: they reduced
# 16.39 GiB reserved to 10.83 GiB (github.com/meta-pytorch/torchtune/issues/1185).
FRAGMENTATION, SHARDED_FRAGMENTATION, EXPANDABLE_FRAGMENTATION = 0.10, 0.20, 0.03
# How far the forecast may be off: without a calibration, on one rank and on several, by the spread of the figures
# above; with one, for models other than its own, an estimate.
UNCERTAINTY_BYTES, UNCERTAINTY_FRACTION, SHARDED_UNCERTAINTY_FRACTION = 1024 * _MIB, 0.06, 0.10
CALIBRATED_UNCERTAINTY_BYTES, CALIBRATED_UNCERTAINTY_FRACTION = 256 * _MIB, 0.02


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of one GPU with one version of torch, in bytes, as ``tune-adaptive calibrate`` writes them.

    ``bytes_per_token`` was measured with a model whose heads times head dimension is ``attention_width``.
    ``fragmentation`` is the ratio of reserved to allocated bytes, minus 1. ``misfit_bytes`` is the largest difference
    between the measured steps and these figures.
    """

    gpu: str
    driver: str
    torch: str
    backend: str
    context_bytes: int
    nccl_bytes: int
    workspace_bytes: int
    bytes_per_token: float
    attention_width: int
    fragmentation: float
    misfit_bytes: int

    def write(self, path: Path) -> None:
        """Write the figures as JSON to ``path``; a reader never sees a half-written file."""
        write_whole(path, json.dumps({"version": CALIBRATION_VERSION} | asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Read the figures from the file at ``path``.

        Raises:
            InputError: the file cannot be read, has another version, or its values are not those of a calibration.
        """
        name = quote(str(path))
        try:
            content = json.loads(path.read_text())
        except (OSError, RecursionError, ValueError) as error:
            raise InputError(f"`calibration` must be a readable file, but is {name}: {reason_of(error)}.") from error
        version = content.get("version") if isinstance(content, dict) else None
        if version != CALIBRATION_VERSION:
            raise InputError(
                f"`calibration` must be of version {CALIBRATION_VERSION}, but {name} is of {quote(version)} instead."
            )
        values: dict[str, Any] = {field.name: content.get(field.name) for field in fields(cls)}
        for field in fields(cls):
            is_text, value = field.type is str, values[field.name]
            if not (isinstance(value, str) if is_text else _is_amount(value)):
                raise InputError(
                    f"`{field.name}` of a calibration must be {'text' if is_text else 'a number from 0 up'}, "
                    f"but is {quote(value)} in {name} instead."
                )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """The memory overhead of a GPU, beside traced bytes; zero by default.

    Attributes:
        outside_bytes: memory of the process outside the allocator.
        workspace_bytes: memory of libraries, the same for every batch size.
        bytes_per_token: memory of kernels per token of a micro-step, with row lengths rounded up to 128.
        fragmentation: reserved minus allocated bytes, as a fraction of allocated bytes.
        uncertainty_bytes, uncertainty_fraction: the forecast may be off by the larger of the two.
        source: where the figures come from, as text.

    Raises:
        InputError: a figure is below zero or not finite.
    """

    outside_bytes: float = 0
    workspace_bytes: float = 0
    bytes_per_token: float = 0
    fragmentation: float = 0
    uncertainty_bytes: float = 0
    uncertainty_fraction: float = 0
    source: str = "nothing added"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "source" and not _is_amount(value):
                raise InputError(f"`{name}` must be a number from 0 up, but is {quote(value)} instead.")

    @classmethod
    def none(cls) -> "Overhead":
        """The overhead of a CPU, where traces are exact: zero."""
        return cls()

    @classmethod
    def default(
        cls, world_size: int, *, attention_width: int = 0, expandable_segments: bool = False, on_amd: bool = False
    ) -> "Overhead":
        """Estimate the overhead of a GPU without a calibration, for one of ``world_size`` ranks.

        ``attention_width`` is heads times head dimension; 0 leaves out flash attention's scratch memory.

        Raises:
            InputError: ``world_size`` is below 1 or ``attention_width`` below 0.
        """
        is_alone = require_integer("world_size", world_size, minimum=1) == 1
        fragmentation = FRAGMENTATION if is_alone else SHARDED_FRAGMENTATION
        outside_bytes = CONTEXT_BYTES + (ONE_RANK_NCCL_BYTES if is_alone else NCCL_BYTES)
        return cls(
            outside_bytes=OUTSIDE_BYTES_ON_AMD if on_amd and not is_alone else outside_bytes,
            workspace_bytes=WORKSPACE_BYTES,
            bytes_per_token=SCRATCH_BYTES_PER_TOKEN_AND_WIDTH
            * require_integer("attention_width", attention_width, minimum=0),
            fragmentation=EXPANDABLE_FRAGMENTATION if expandable_segments else fragmentation,
            uncertainty_bytes=UNCERTAINTY_BYTES,
            uncertainty_fraction=UNCERTAINTY_FRACTION if is_alone else SHARDED_UNCERTAINTY_FRACTION,
            source="from published measurements and estimates; run `tune-adaptive calibrate` to measure your GPU",
        )

    @classmethod
    def from_calibration(cls, path: Path, world_size: int, *, attention_width: int = 0) -> "Overhead":
        """The overhead of the GPU whose calibration is at ``path``, for one of ``world_size`` ranks.

        A calibration measures NCCL on a single rank. For more ranks the default is used, or the measurement if larger.

        Raises:
            InputError: the file is invalid, or ``world_size`` or ``attention_width`` is out of range.
        """
        measured = Calibration.read(path)
        world_size = require_integer("world_size", world_size, minimum=1)
        attention_width = require_integer("attention_width", attention_width, minimum=0)
        nccl_bytes = measured.nccl_bytes if world_size == 1 else max(measured.nccl_bytes, NCCL_BYTES)
        return cls(
            outside_bytes=measured.context_bytes + nccl_bytes,
            workspace_bytes=measured.workspace_bytes,
            bytes_per_token=measured.bytes_per_token * attention_width / max(1, measured.attention_width),
            fragmentation=measured.fragmentation,
            uncertainty_bytes=max(measured.misfit_bytes, CALIBRATED_UNCERTAINTY_BYTES),
            uncertainty_fraction=CALIBRATED_UNCERTAINTY_FRACTION,
            source=f"calibrated on {measured.gpu} ({measured.driver}, torch {measured.torch}, {measured.backend})",
        )

    def allocated_bytes(self, traced_bytes: float, *, num_tokens: int = 0) -> float:
        """The value of ``torch.cuda.max_memory_allocated`` for a micro-step of ``num_tokens`` tokens.

        >>> Overhead(workspace_bytes=50, bytes_per_token=2).allocated_bytes(1000, num_tokens=25)
        1100
        """
        return traced_bytes + self.workspace_bytes + self.bytes_per_token * num_tokens

    def reserved_bytes(self, traced_bytes: float, *, num_tokens: int = 0) -> float:
        """The value of ``torch.cuda.max_memory_reserved`` for a micro-step of ``num_tokens`` tokens.

        >>> Overhead(workspace_bytes=50, bytes_per_token=2, fragmentation=0.5).reserved_bytes(1000, num_tokens=25)
        1650.0
        """
        return self.allocated_bytes(traced_bytes, num_tokens=num_tokens) * (1 + self.fragmentation)

    def uncertainty_bytes_at(self, traced_bytes: float) -> float:
        """How far the forecast may be off at ``traced_bytes``, in either direction; an estimate."""
        return max(self.uncertainty_bytes, self.uncertainty_fraction * traced_bytes)

    def usable_bytes(self, limit_bytes: float, margin: float) -> float:
        """How much of ``limit_bytes`` of a GPU a process may use. The rest is reserved as margin.

        The margin is the fraction ``margin`` of the bytes that the allocator may reserve.

        >>> Overhead(outside_bytes=300).usable_bytes(2700, 0.25)
        2100.0
        """
        return min(limit_bytes, self.outside_bytes + max(0.0, self._reservable_bytes(limit_bytes, margin)))

    def largest_traced_bytes(self, limit_bytes: float, margin: float, *, num_tokens: int = 0) -> float:
        """The most traced bytes with which a process uses at most ``usable_bytes`` of a GPU; 0 if nothing fits.

        Raises:
            InputError: ``margin`` is not in [0, 1).

        >>> Overhead(outside_bytes=300, workspace_bytes=100, fragmentation=0.5).largest_traced_bytes(2700, 0.25)
        1100.0
        """
        if not 0 <= margin < 1:
            raise InputError(f"`margin` must be in [0, 1), but is {quote(margin)} instead.")
        allocated_bytes = self._reservable_bytes(limit_bytes, margin) / (1 + self.fragmentation)
        return max(0.0, allocated_bytes - self.workspace_bytes - self.bytes_per_token * num_tokens)

    def _reservable_bytes(self, limit_bytes: float, margin: float) -> float:
        return (limit_bytes - self.outside_bytes) * (1 - margin)


def _is_amount(value: object) -> bool:
    return is_number(value) and 0 <= value <= sys.float_info.max

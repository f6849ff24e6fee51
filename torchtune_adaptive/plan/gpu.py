"""The memory of a GPU: what CUDA lets a process use of it, and its overhead beside the live bytes that a trace counts.

    allocated = traced + workspaces + scratch per token of the backward pass
    reserved  = allocated * (1 + fragmentation)
    process   = reserved + outside the allocator (CUDA context, NCCL)

The overhead's constants are for a GPU without a calibration. They are published measurements, each with its source, or
estimates where a comment says so. None was measured for this project. ``tune-adaptive calibrate`` replaces them.

A vendor's "80 GB", the size that `nvidia-smi` reports and the size that CUDA lets a process use all differ. For an
A100 80GB the second is 81920 MiB, which is 85.9 decimal GB, and the third is about 700 MiB less. A forecast needs the
third, which torch calls "total capacity". Where sources differ, the table has the smallest figure.
"""

import difflib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchtune_adaptive.errors import InputError, is_number, quote, reason_of, require_integer
from torchtune_adaptive.files import write_atomically
from torchtune_adaptive.text import parse_memory

# ---- known GPUs

_MIB = 2**20
_GIB = 2**30
# An estimate of what the driver reserves of the memory that `nvidia-smi` reports. Where both figures were found it is
# 451 MiB (T4) to 881 MiB (A100 80GB), neither a fixed size nor a fixed share, so this is above the largest.
_DRIVER_BYTES = 896 * _MIB
# An estimate: a smaller size without a unit cannot be a GPU's memory; the unit must be missing.
_SMALLEST_BARE_BYTES = _MIB
# Parts of a name that may be left out: vendor, brand, form factor and kind of memory.
_OPTIONAL_PARTS = re.compile(r"nvidia|amd|instinct|geforce|tesla|rtx|generation|sxm[0-9]?|pcie|hbm[0-9]?e?|[^a-z0-9]")


@dataclass(frozen=True)
class Gpu:
    """One GPU: ``memory_bytes`` that a process can use, and the kind and address of their source."""

    memory_bytes: int
    source: str
    is_amd: bool = False


def _seen_by_cuda(memory_bytes: float, source: str, *, is_amd: bool = False) -> Gpu:
    return Gpu(int(memory_bytes), f"seen by {'HIP' if is_amd else 'CUDA'}: {source}", is_amd)


def _reported(memory_bytes: int, source: str, *, is_amd: bool = False) -> Gpu:
    """A GPU for which only the driver's figure is known, minus what the driver may reserve."""
    said = f"reported by the driver, minus {_DRIVER_BYTES // _MIB} MiB: {source}"
    return Gpu(memory_bytes - _DRIVER_BYTES, said, is_amd)


_GITHUB = "https://github.com/"
_BLOG = "https://thundergolfer.com/blog/nvidia-gpu-memory-capacity"

KNOWN_GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "T4": _seen_by_cuda(14.56 * _GIB, _GITHUB + "Zheng-Chong/CatVTON/issues/133"),
        "V100 16GB": _reported(16384 * _MIB, _GITHUB + "huggingface/text-generation-inference/issues/424"),
        "V100 32GB": _seen_by_cuda(32501 * _MIB, _GITHUB + "ollama/ollama/issues/16533"),
        "A10": _seen_by_cuda(21.99 * _GIB, _GITHUB + "zai-org/CogVLM/issues/236"),
        # The source prints 22.0 GiB; this is the smallest size that rounds to it.
        "A10G": _seen_by_cuda(21.95 * _GIB, _GITHUB + "batteries-included/batteries-included/pull/1663"),
        "A30": _seen_by_cuda(23.53 * _GIB, _GITHUB + "google/RB-Modulation/issues/5"),
        # The source prints 44.4 GiB.
        "A40": _seen_by_cuda(44.35 * _GIB, _GITHUB + "ollama/ollama/issues/9858"),
        "A100 40GB": _seen_by_cuda(42298834944, _GITHUB + "bottlerocket-os/bottlerocket/pull/3873"),
        "A100 80GB": _seen_by_cuda(79.14 * _GIB, _GITHUB + "lianqi1008/Control-GIC/issues/6"),
        "RTX 3090": _seen_by_cuda(24123 * _MIB, _GITHUB + "ggml-org/llama.cpp/issues/24608"),
        "RTX 4090": _seen_by_cuda(23.52 * _GIB, _GITHUB + "vllm-project/vllm/issues/42049"),
        "RTX 5090": _seen_by_cuda(32106 * _MIB, _GITHUB + "ggml-org/llama.cpp/issues/17536"),
        # With ECC; without it 50865307648 bytes (github.com/unslothai/unsloth-zoo/pull/1053).
        "RTX 6000 Ada": _seen_by_cuda(44.43 * _GIB, _GITHUB + "DINGYANB/MTVCrafter/issues/21"),
        "L4": _reported(23034 * _MIB, _BLOG),
        "L40": _seen_by_cuda(44.40 * _GIB, _GITHUB + "QwenLM/Qwen3-VL/issues/2097"),
        "L40S": _seen_by_cuda(44.42 * _GIB, _GITHUB + "stepfun-ai/Step-Video-T2V/issues/8"),
        "H100 80GB": _seen_by_cuda(79.11 * _GIB, _GITHUB + "vllm-project/vllm/issues/27508"),
        "H100 NVL": _reported(99961274368, _GITHUB + "fastfetch-cli/fastfetch/issues/1658"),
        "H200": _reported(143771 * _MIB, _BLOG),
        # Printed as "GB", but it is GiB: `nvidia-smi` reports 183359 MiB (NVIDIA/TensorRT-LLM/issues/10278).
        "B200": _seen_by_cuda(178.35 * _GIB, _GITHUB + "pytorch/ao/pull/4002"),
        "MI300X": _reported(201310208 * 2**10, _GITHUB + "ROCm/vllm/issues/397", is_amd=True),
        # The source says 288 GiB; this is the smallest size that a share of 0.95 rounds to what it says.
        "MI355X": _seen_by_cuda(287.95 * _GIB, _GITHUB + "SemiAnalysisAI/InferenceX/pull/2522", is_amd=True),
    }
)
_AMBIGUOUS = {"v100": ("V100 16GB", "V100 32GB"), "a100": ("A100 40GB", "A100 80GB")}


def _key(name: str) -> str:
    return _OPTIONAL_PARTS.sub("", name.lower())


_NAMES = {_key(name): name for name in KNOWN_GPUS} | {"h100": "H100 80GB"}  # an H100 94GB is always called NVL


def is_amd(text: str) -> bool:
    """Whether ``text`` names one of AMD's GPUs; a size does not.

    >>> is_amd("AMD Instinct MI300X"), is_amd("H100"), is_amd("192GiB")
    (True, False, False)
    """
    name = _NAMES.get(_key(text))
    return name is not None and KNOWN_GPUS[name].is_amd


def memory_of(text: str) -> int:
    """Bytes that a process can use on a GPU, given by its name or as a size with a unit.

    Case, separators, vendor and form factor do not matter: "NVIDIA A100-SXM4-80GB" is "a100 80gb". "H100" means the
    80 GB version; "A100" and "V100" need their size in the name. A size is used as it is, with nothing reserved.

    Raises:
        InputError: ``text`` is neither a size nor a known name, or it names GPUs of several sizes.

    >>> memory_of("80GiB") / 2**30, memory_of("h100") == memory_of("H100 80GB HBM3")
    (80.0, True)
    """
    key = _key(text)
    if key in _NAMES:
        return KNOWN_GPUS[_NAMES[key]].memory_bytes
    if key in _AMBIGUOUS:
        raise InputError(
            f"`memory` must name its memory, as in {' or '.join(_AMBIGUOUS[key])}, but is {quote(text)} instead."
        )
    try:
        memory_bytes = parse_memory(text)
    except InputError:
        memory_bytes = 0
    if memory_bytes == 0 or (memory_bytes < _SMALLEST_BARE_BYTES and not re.search("[a-z]", text, re.IGNORECASE)):
        nearest = difflib.get_close_matches(key, _NAMES, n=2)
        hint = f"; did you mean {' or '.join(f'`{_NAMES[found]}`' for found in nearest)}?" if nearest else "."
        raise InputError(
            f"`memory` must be a size like 80GiB or one of {', '.join(KNOWN_GPUS)}, but is {quote(text)} instead{hint}"
        )
    return memory_bytes


# ---- overhead

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
# How far the forecast may be off, as a fraction of the reserved bytes: without a calibration, on one rank and on
# several, by the spread of the figures above; with one, for models other than its own, an estimate.
UNCERTAINTY_BYTES, UNCERTAINTY_FRACTION, SHARDED_UNCERTAINTY_FRACTION = 1024 * _MIB, 0.06, 0.10
CALIBRATED_UNCERTAINTY_BYTES, CALIBRATED_UNCERTAINTY_FRACTION = 256 * _MIB, 0.02
_EXPANDABLE = "expandable_segments:True"  # in the settings of torch's allocator


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
        write_atomically(path, json.dumps({"version": CALIBRATION_VERSION} | asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Read the figures from the file at ``path``.

        Raises:
            InputError: the file cannot be read, has another version, or its values are not those of a calibration.
        """
        name = quote(str(path))
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, RecursionError, ValueError) as error:
            raise InputError(f"`calibration` {name} cannot be read: {reason_of(error)}.") from error
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
        bytes_per_token: memory of the backward pass's kernels per token, with row lengths rounded up to 128.
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
    def calibrated(cls, measured: Calibration, world_size: int, *, attention_width: int = 0) -> "Overhead":
        """The overhead of the GPU that was ``measured``, for one of ``world_size`` ranks.

        A calibration measures a single rank. More ranks have the default's NCCL, fragmentation and uncertainty, or the
        measurement if it is larger.

        Raises:
            InputError: ``world_size`` or ``attention_width`` is out of range.
        """
        expandable = _EXPANDABLE in measured.backend
        usual = cls.default(world_size, attention_width=attention_width, expandable_segments=expandable)
        is_alone = world_size == 1
        return cls(
            outside_bytes=measured.context_bytes + max(measured.nccl_bytes, 0 if is_alone else NCCL_BYTES),
            workspace_bytes=measured.workspace_bytes,
            bytes_per_token=measured.bytes_per_token * attention_width / max(1, measured.attention_width),
            fragmentation=max(measured.fragmentation, 0 if is_alone else usual.fragmentation),
            uncertainty_bytes=max(measured.misfit_bytes, CALIBRATED_UNCERTAINTY_BYTES),
            uncertainty_fraction=CALIBRATED_UNCERTAINTY_FRACTION if is_alone else usual.uncertainty_fraction,
            source=f"calibrated on {measured.gpu} ({measured.driver}, torch {measured.torch}, {measured.backend})",
        )

    def allocated_bytes(self, traced_bytes: Mapping[str, float], *, num_tokens: int = 0) -> float:
        """The value of ``torch.cuda.max_memory_allocated`` for a micro-step of ``num_tokens`` tokens.

        Attention takes its scratch memory in the backward pass, which need not have the highest traced peak.

        Args:
            traced_bytes: the traced peak of each phase.

        >>> overhead = Overhead(workspace_bytes=50, bytes_per_token=2)
        >>> overhead.allocated_bytes({"loss": 1000, "backward": 980}, num_tokens=25)
        1080
        """
        scratch_bytes = self.bytes_per_token * num_tokens
        return self.workspace_bytes + max(
            peak_bytes + (scratch_bytes if phase == "backward" else 0) for phase, peak_bytes in traced_bytes.items()
        )

    def reserved_bytes(self, allocated_bytes: float) -> float:
        """The value of ``torch.cuda.max_memory_reserved`` for so many allocated bytes."""
        return allocated_bytes * (1 + self.fragmentation)

    def uncertainty_bytes_at(self, reserved_bytes: float) -> float:
        """How far the forecast of ``reserved_bytes`` may be off, in either direction; an estimate."""
        return max(self.uncertainty_bytes, self.uncertainty_fraction * reserved_bytes)

    def usable_bytes(self, limit_bytes: float, margin: float) -> float:
        """How much of ``limit_bytes`` of a GPU a process may use. The rest is reserved as margin.

        The margin is the fraction ``margin`` of the bytes that the allocator may reserve.

        >>> Overhead(outside_bytes=300).usable_bytes(2700, 0.25)
        2100.0
        """
        reservable_bytes = max(0.0, limit_bytes - self.outside_bytes) * (1 - margin)
        return min(limit_bytes, self.outside_bytes + reservable_bytes)


# ---- the GPU that a user names


@dataclass(frozen=True, kw_only=True)
class Card:
    """The GPU of each rank.

    Attributes:
        name: as the user gave it.
        memory_bytes: memory that a process can use; None if only the allocator's limit is known.
        calibration: what was measured on it.
    """

    name: str
    memory_bytes: int | None
    calibration: Calibration | None = None

    @classmethod
    def named(cls, text: str, *, calibration: Path | None = None) -> "Card":
        """The GPU of that name, or with so much memory, and with the ``calibration`` in that file.

        Raises:
            InputError: there is no such GPU, or the calibration is invalid, of another GPU, or was made with other
                settings of torch's allocator.
        """
        memory_bytes = memory_of(text)
        return cls(name=text, memory_bytes=memory_bytes, calibration=_read_calibration(calibration, text))

    @classmethod
    def limited(cls, name: str, *, calibration: Path | None = None) -> "Card":
        """A GPU of unknown memory, of which a config says how much torch's allocator may use. Errors as above."""
        return cls(name=name, memory_bytes=None, calibration=_read_calibration(calibration, name))

    def overhead(self, world_size: int, *, attention_width: int) -> Overhead:
        """Its overhead on one of ``world_size`` ranks; see ``Overhead.default``."""
        if self.calibration is not None:
            return Overhead.calibrated(self.calibration, world_size, attention_width=attention_width)
        return Overhead.default(
            world_size,
            attention_width=attention_width,
            expandable_segments=_EXPANDABLE in _allocator_settings(),
            on_amd=is_amd(self.name),
        )


def _allocator_settings() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _read_calibration(path: Path | None, name: str) -> Calibration | None:
    """The calibration in the file at ``path``, for the GPU ``name``."""
    if path is None:
        return None
    measured = Calibration.read(path)
    planned, calibrated = (_NAMES.get(_key(text)) for text in (name, measured.gpu))
    if planned is not None and planned != calibrated:
        raise InputError(
            f"`--calibration` must be of the GPU that is planned, {planned}, but is of {quote(measured.gpu)} instead."
        )
    settings = _allocator_settings()
    if settings and settings not in measured.backend:
        raise InputError(
            "`PYTORCH_ALLOC_CONF` must be as it was when the GPU was calibrated"
            f" ({measured.backend.partition(', ')[2]}), but is {quote(settings)} instead."
        )
    return measured


def _is_amount(value: object) -> bool:
    return is_number(value) and 0 <= value <= sys.float_info.max

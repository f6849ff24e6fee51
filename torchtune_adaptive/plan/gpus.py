"""Memory that CUDA lets a process use on known GPUs.

A vendor's "80 GB", the size that `nvidia-smi` reports and the size that CUDA lets a process use all differ. For an
A100 80GB the second is 81920 MiB, which is 85.9 decimal GB, and the third is about 700 MiB less. A forecast needs the
third, which torch calls "total capacity". Where sources differ, the table has the smallest figure.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torchtune_adaptive.errors import InputError, quote
from torchtune_adaptive.settings import parse_memory

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

"""The memory of a GPU: what CUDA lets a process use of it, and what a process has on it beside its tensors.

    process = reserved by torch's allocator (``replay.py``) + outside of it (CUDA context, kernels, NCCL)

Figures are measurements, each with its source. Where they differ, the plan has the least and the most.

A vendor's "80 GB", the size that `nvidia-smi` reports and the size that CUDA lets a process use all differ. For an
A100 80GB the second is 81920 MiB, which is 85.9 decimal GB, and the third is about 700 MiB less. A forecast needs the
third, which torch calls "total capacity". Where sources differ, the table has the smallest figure.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from torchtune_adaptive.errors import InputError, quote
from torchtune_adaptive.text import parse_memory, size_meant

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
# Threads that a multiprocessor runs at once, by CUDA's programming guide.
_TURING, _GAMING, _LARGE = 1024, 1536, 2048
# cuBLAS takes a workspace for each thread that multiplies matrices: 8.125 MiB, but 32 MiB on Hopper and Blackwell
# (CublasHandlePool.cpp).
_WORKSPACE_BYTES, _LARGE_WORKSPACE_BYTES = 8519680, 32 * _MIB
_ANY_THREADS = 132 * _LARGE  # also of AMD's GPUs, where it was not looked up


class Gpu(NamedTuple):
    """What is known of a kind of GPU.

    Attributes:
        memory_bytes: what CUDA or HIP lets a process use.
        context_mib: CUDA's context with the kernels in it, the least and the most by torch's own out-of-memory texts of
            processes without NCCL: in use, less allocated, less reserved. None: unknown, as on AMD's.
        threads: that it runs at once: its multiprocessors, by its data sheet, times the threads of one.
        workspace_bytes: of cuBLAS, for each thread.
    """

    memory_bytes: int
    context_mib: tuple[int, int] | None
    threads: int
    workspace_bytes: int = _WORKSPACE_BYTES


# Each with the address of its memory. Beside the context stands how many texts were read, and one of them where it can
# be cited.
KNOWN_GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        # github.com/Zheng-Chong/CatVTON/issues/133
        # context: 14, github.com/FoundationVision/GenerateU/issues/10
        "T4": Gpu(int(14.56 * _GIB), (96, 207), 40 * _TURING),
        # github.com/huggingface/text-generation-inference/issues/424
        "V100 16GB": Gpu(16384 * _MIB - _DRIVER_BYTES, (369, 399), 80 * _LARGE),  # context: 9 of both kinds
        "V100 32GB": Gpu(32501 * _MIB, (369, 399), 80 * _LARGE),  # github.com/ollama/ollama/issues/16533
        # github.com/zai-org/CogVLM/issues/236; context: 4 of A10 and A10G, the same issue
        "A10": Gpu(int(21.99 * _GIB), (224, 432), 72 * _GAMING),
        # github.com/batteries-included/batteries-included/pull/1663 prints 22.0 GiB; the smallest that rounds to it
        "A10G": Gpu(int(21.95 * _GIB), (224, 432), 80 * _GAMING),
        # github.com/google/RB-Modulation/issues/5; context: as other cards of its architecture
        "A30": Gpu(int(23.53 * _GIB), (224, 543), 56 * _LARGE),
        # github.com/ollama/ollama/issues/9858 prints 44.4 GiB; context: 3, of the RTX A6000, which has the same chip
        "A40": Gpu(int(44.35 * _GIB), (294, 358), 84 * _GAMING),
        # github.com/bottlerocket-os/bottlerocket/pull/3873
        # context: 10 of both kinds, github.com/TianheWu/CoSeR/issues/10
        "A100 40GB": Gpu(42298834944, (409, 543), 108 * _LARGE),
        "A100 80GB": Gpu(int(79.14 * _GIB), (409, 543), 108 * _LARGE),  # github.com/lianqi1008/Control-GIC/issues/6
        "RTX 3090": Gpu(24123 * _MIB, (260, 420), 82 * _GAMING),  # github.com/ggml-org/llama.cpp/issues/24608; 5
        # github.com/vllm-project/vllm/issues/42049; context: 7, github.com/3DTopia/Phidias-Diffusion/issues/8
        "RTX 4090": Gpu(int(23.52 * _GIB), (379, 579), 128 * _GAMING),
        # github.com/ggml-org/llama.cpp/issues/17536; context: 11, github.com/Wan-Video/Wan2.1/issues/465
        "RTX 5090": Gpu(32106 * _MIB, (499, 672), 170 * _GAMING, _LARGE_WORKSPACE_BYTES),
        # github.com/DINGYANB/MTVCrafter/issues/21, with ECC; without it 50865307648 bytes
        # (github.com/unslothai/unsloth-zoo/pull/1053). Context: as the L40S, and the first issue
        "RTX 6000 Ada": Gpu(int(44.43 * _GIB), (426, 514), 142 * _GAMING),
        # thundergolfer.com/blog/nvidia-gpu-memory-capacity; context: 2, github.com/ArcInstitute/evo2/issues/190
        "L4": Gpu(23034 * _MIB - _DRIVER_BYTES, (236, 251), 58 * _GAMING),
        "L40": Gpu(int(44.40 * _GIB), (507, 514), 142 * _GAMING),  # github.com/QwenLM/Qwen3-VL/issues/2097, both
        # github.com/stepfun-ai/Step-Video-T2V/issues/8
        # context: github.com/huggingface/sentence-transformers/issues/3214
        "L40S": Gpu(int(44.42 * _GIB), (507, 514), 142 * _GAMING),
        # github.com/vllm-project/vllm/issues/27508; context: 5
        "H100 80GB": Gpu(int(79.11 * _GIB), (599, 749), 132 * _LARGE, _LARGE_WORKSPACE_BYTES),
        # github.com/fastfetch-cli/fastfetch/issues/1658; context: as the H100 80GB
        "H100 NVL": Gpu(99961274368 - _DRIVER_BYTES, (599, 749), 132 * _LARGE, _LARGE_WORKSPACE_BYTES),
        # thundergolfer.com/blog/nvidia-gpu-memory-capacity; context: 4, and benchmarks/results/gpu_nvidia_h200.md
        "H200": Gpu(143771 * _MIB - _DRIVER_BYTES, (522, 767), 132 * _LARGE, _LARGE_WORKSPACE_BYTES),
        # github.com/pytorch/ao/pull/4002 prints "GB", but it is GiB: `nvidia-smi` reports 183359 MiB
        # (NVIDIA/TensorRT-LLM/issues/10278). Context: 2 that ran no matrix product; the most is that of an H200
        "B200": Gpu(int(178.35 * _GIB), (612, 767), 148 * _LARGE, _LARGE_WORKSPACE_BYTES),
        "MI300X": Gpu(201310208 * 2**10 - _DRIVER_BYTES, None, _ANY_THREADS),  # github.com/ROCm/vllm/issues/397
        # github.com/SemiAnalysisAI/InferenceX/pull/2522 says 288 GiB; the smallest of which a share of 0.95 rounds to
        # what it says
        "MI355X": Gpu(int(287.95 * _GIB), None, _ANY_THREADS),
    }
)
# One that is given by its size, with the least and the most context of all.
_ANY_GPU = Gpu(0, (96, 767), _ANY_THREADS, _LARGE_WORKSPACE_BYTES)
_AMBIGUOUS = {"v100": ("V100 16GB", "V100 32GB"), "a100": ("A100 40GB", "A100 80GB")}


def _key(name: str) -> str:
    return _OPTIONAL_PARTS.sub("", name.lower())


_NAMES = {_key(name): name for name in KNOWN_GPUS} | {"h100": "H100 80GB"}  # an H100 94GB is always called NVL


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
        names = dict.fromkeys(_NAMES[found] for found in difflib.get_close_matches(key, _NAMES, n=2))
        nearest = [size] if (size := size_meant(text)) else [*names]
        hint = f"; did you mean {' or '.join(f'`{name}`' for name in nearest)}?" if nearest else "."
        raise InputError(
            f"`memory` must be a size like 80GiB or one of {', '.join(KNOWN_GPUS)}, but is {quote(text)} instead{hint}"
        )
    return memory_bytes


# ---- what a process has on a GPU beside its tensors

# NCCL's memory in a process, the least and the most seen. Of a group of one rank: 512 MiB (NCCL 2.28 on B300:
# github.com/NVIDIA/nccl/issues/2363), 560 MiB (H200, benchmarks/results/gpu_nvidia_h200.md). Of more ranks: 544 to
# 688 MiB on four A100 (github.com/NVIDIA/nccl/issues/964); about 1.6 GB, which seems to be the whole process
# (github.com/NVIDIA/nccl/issues/864), less its context. More groups take more.
_ONE_RANK_NCCL = (512 * _MIB, 576 * _MIB)
_NCCL = (544 * _MIB, 1024 * _MIB)
# Memory outside the allocator on AMD GPUs, mostly RCCL: processes of 13.6 to 14.0 GB, less 5.65 GiB reserved, on 8
# MI355X ("OTel" in benchmarks/published_gpu.json). Of a single one nothing is known.
_ON_AMD = (7168 * _MIB, 7680 * _MIB)
_NUM_WORKSPACES = 2  # the threads of forward and backward passes multiply matrices
# How far reserved bytes may be off, as a fraction of them; see benchmarks/results/plan_accuracy_simulated.md.
_UNCERTAINTY = 0.01
_EXPANDABLE = "expandable_segments"
# Settings of torch's allocator that its model lacks.
_NOT_MODELLED = (
    *("max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb", "roundup_power2_divisions"),
    *("garbage_collection_threshold", "per_process_memory_fraction", "backend"),
)


def _allocator_settings() -> dict[str, str]:
    """The settings of torch's allocator in this process, which are those of the run. Blanks do not count in them.

    Raises:
        InputError: with them torch does not start.
    """
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    settings = dict(re.findall(r"([^,:]+):(\[[^]]*\]|[^,]*)", "".join(text.split())))  # a list has commas and colons
    if (value := settings.get(_EXPANDABLE, "False")) not in ("True", "False"):
        raise InputError(f"`{_EXPANDABLE}` of torch's allocator must be True or False, but is {quote(value)} instead.")
    return settings


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What the process of a rank has on its device beside the tensors of a step; nothing by default, as on a CPU.

    Attributes:
        least_outside_bytes, most_outside_bytes: outside torch's allocator: context, kernels, NCCL.
        workspaces: bytes of the blocks that libraries keep within it.
        threads: that the device runs at once, on which the scratch memory of sums depends.
        expandable: the allocator has expandable segments.
        uncertainty: how far reserved bytes may be off, as a fraction of them.
        caches: the device has an allocator that keeps memory. A CPU has none.
        note: what limits these figures, as a sentence; "" if nothing.
    """

    least_outside_bytes: int = 0
    most_outside_bytes: int = 0
    workspaces: tuple[int, ...] = ()
    threads: int = 0
    expandable: bool = False
    uncertainty: float = 0
    caches: bool = False
    note: str = ""


# ---- the GPU that a user names


@dataclass(frozen=True, kw_only=True)
class Card:
    """The GPU of each rank.

    Attributes:
        name: as the user gave it.
        memory_bytes: memory that a process can use; None if only the allocator's limit is known.
        allocator: the settings of torch's allocator.
    """

    name: str
    memory_bytes: int | None = None
    allocator: Mapping[str, str] = field(default_factory=_allocator_settings)

    @classmethod
    def named(cls, text: str) -> "Card":
        """The GPU of that name, or with so much memory.

        Raises:
            InputError: there is no such GPU.
        """
        return cls(name=text, memory_bytes=memory_of(text))

    def overhead(self, world_size: int, *, has_group: bool = True) -> Overhead:
        """What one of ``world_size`` ranks has on it beside its tensors.

        Args:
            has_group: a single rank has a process group, too, as in recipes for several.
        """
        name = _NAMES.get(_key(self.name))
        gpu = _ANY_GPU if name is None else KNOWN_GPUS[name]
        if gpu.context_mib is None:
            least, most = _ON_AMD
        else:
            nccl = _NCCL if world_size > 1 else _ONE_RANK_NCCL if has_group else (0, 0)
            least, most = (_MIB * context + added for context, added in zip(gpu.context_mib, nccl, strict=True))
        lacking = ", ".join(
            f"{key}:{value}" for key, value in self.allocator.items() if key in _NOT_MODELLED and value != "native"
        )
        return Overhead(
            least_outside_bytes=least,
            most_outside_bytes=most,
            workspaces=(gpu.workspace_bytes,) * _NUM_WORKSPACES,
            threads=gpu.threads,
            expandable=self.allocator.get(_EXPANDABLE) == "True",
            uncertainty=_UNCERTAINTY,
            caches=True,
            note=f"Reserved bytes are those without {lacking}, which the model of the allocator lacks."
            if lacking
            else "",
        )

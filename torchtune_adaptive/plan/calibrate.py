"""Measure the memory that a real GPU needs beside traced bytes, for `tune-adaptive calibrate`.

Only ``CudaCard`` uses the GPU, so the rest can be tested without one. The order of the measurements matters: an
operation must not run on the GPU before it is measured, because its first run allocates the memory.
"""

import os
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.collect_env import get_nvidia_driver_version, run
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss

from torchtune_adaptive.engine.memory.out_of_memory import free_memory
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.files import check_writable, writing
from torchtune_adaptive.plan.gpu import Calibration
from torchtune_adaptive.plan.trace.loop import trace_loop
from torchtune_adaptive.text import format_bytes

# A `llama3` with random weights, small enough for a GPU of 16 GB (an estimate: it has not run on one).
CALIBRATION_MODEL = {
    "vocab_size": 32_000,
    "num_layers": 4,
    "num_heads": 32,
    "num_kv_heads": 8,
    "embed_dim": 2048,
    "max_seq_len": 1024,
    "intermediate_dim": 8192,
}
BATCH_SIZES = (2, 3, 8)
_WARM_UP_STEPS = 2  # the first allocates the optimizer's state; the second already runs as all later steps do
# An estimate: no CUDA context alone is this large. If more is in use, other processes use the GPU.
_LARGEST_CONTEXT_BYTES = 2 * 2**30


@dataclass(frozen=True)
class StepPeak:
    """Peaks of the allocator's allocated and reserved bytes in a train step of ``num_tokens`` tokens."""

    num_tokens: int
    allocated_bytes: int
    reserved_bytes: int


class CalibrationLoop:
    """The functions of the loop that a calibration runs on the GPU, and traces.

    Args:
        model_arguments: of ``llama3``.
    """

    def __init__(self, model_arguments: Mapping[str, int] = CALIBRATION_MODEL) -> None:
        self._arguments = model_arguments
        self._loss = CEWithChunkedOutputLoss()

    def build_model(self) -> Any:
        """The model in bfloat16, on the default device."""
        outer_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model: Any = llama3(**self._arguments)
        finally:
            torch.set_default_dtype(outer_dtype)
        model.set_num_output_chunks(self._loss.num_output_chunks)
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of all parameters."""
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, tokens_BS: torch.Tensor) -> None:
        """A whole step on tokens [B, S]."""
        self._loss(model(tokens_BS), tokens_BS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def make_batch(self, batch_size: int) -> torch.Tensor:
        """Tokens [B, S]."""
        return torch.zeros(batch_size, self._arguments["max_seq_len"], dtype=torch.long)

    def traced_bytes(self, batch_sizes: Sequence[int]) -> list[float]:
        """Traced peaks of a step on a GPU. Nothing runs on one."""
        traced = trace_loop(self.build_model, self.build_optimizer, self.train_step, self.make_batch)
        return [traced.peaks.peak_bytes(batch_size) for batch_size in batch_sizes]


class MeasuredCard(ABC):
    """What a calibration needs to know about a GPU."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """``gpu``, ``driver``, ``torch``, and ``backend``, which is the allocator's kind and settings."""

    @abstractmethod
    def outside_bytes(self) -> int:
        """Bytes of the GPU in use outside the allocator. The first call creates the CUDA context."""

    @abstractmethod
    def outside_bytes_in_a_group(self) -> int:
        """``outside_bytes`` after the first collective of a process group of one rank. The group is then destroyed."""

    @abstractmethod
    def workspace_bytes(self) -> int:
        """Bytes that stay allocated after the first bfloat16 matrix product and its backward pass."""

    @abstractmethod
    def train(self, loop: CalibrationLoop, batch_size: int) -> StepPeak:
        """Run some train steps of ``loop``, free the model and return the peak of the last step."""


def calibrate(output: Path, *, device_index: int = 0, card: MeasuredCard | None = None) -> Calibration:
    """Measure one GPU, write the figures to ``output`` and return them. No other process may use the GPU.

    Args:
        card: the GPU to measure; by default that of ``device_index``.

    Raises:
        InputError: CUDA is missing, the device does not exist, other processes use it, or ``output`` is not writable.
    """
    card = _cuda_card(device_index) if card is None else card
    with writing("output", output):
        check_writable(output)  # before minutes of measurements
    loop = CalibrationLoop()
    traced_bytes = loop.traced_bytes(BATCH_SIZES)  # before the GPU is used
    created_bytes = measure_context_bytes(card)
    product_bytes = measure_workspace_bytes(card)
    peaks = [card.train(loop, batch_size) for batch_size in BATCH_SIZES]
    workspace_bytes, bytes_per_token, misfit_bytes = fit_residuals(peaks, traced_bytes)
    measured = Calibration(
        **card.describe(),
        context_bytes=max(created_bytes, card.outside_bytes()),  # now with the kernels that training loaded
        nccl_bytes=measure_nccl_bytes(card),
        workspace_bytes=max(workspace_bytes, product_bytes),
        bytes_per_token=bytes_per_token,
        attention_width=CALIBRATION_MODEL["embed_dim"],
        fragmentation=measure_fragmentation(peaks),
        misfit_bytes=misfit_bytes,
    )
    with writing("output", output):
        measured.write(output)
    return measured


def measure_context_bytes(card: MeasuredCard) -> int:
    """Bytes outside the allocator once the CUDA context exists, before anything is computed.

    Raises:
        InputError: more is in use than a context needs, so that other processes must use the GPU.
    """
    context_bytes = card.outside_bytes()
    if context_bytes > _LARGEST_CONTEXT_BYTES:
        raise InputError(
            f"A GPU must not be in use when its calibration begins, but {format_bytes(context_bytes)} of it are in use."
        )
    return context_bytes


def measure_workspace_bytes(card: MeasuredCard) -> int:
    """Bytes of cuBLAS's workspaces: those that stay allocated after the first matrix product and its backward pass."""
    return max(0, card.workspace_bytes())


def measure_nccl_bytes(card: MeasuredCard) -> int:
    """Bytes that the first collective of a single rank allocates outside the allocator."""
    before_bytes = card.outside_bytes()
    return max(0, card.outside_bytes_in_a_group() - before_bytes)


def measure_fragmentation(peaks: Sequence[StepPeak]) -> float:
    """The largest ratio of reserved to allocated bytes of the steps, less 1; at least 0."""
    return max(0.0, max(peak.reserved_bytes / peak.allocated_bytes for peak in peaks) - 1)


def fit_residuals(peaks: Sequence[StepPeak], traced_bytes: Sequence[float]) -> tuple[int, float, int]:
    """Fit a line over the number of tokens that is at or above every difference of measured and traced peak.

    Returns:
        The line's constant, its bytes per token, and its largest distance from a measurement. The first two are at
        least 0: if a trace counts too much, the fit does not lower the next forecast.

    >>> peaks = [StepPeak(10, 1120, 0), StepPeak(20, 2140, 0), StepPeak(40, 4180, 0)]
    >>> fit_residuals(peaks, [1000.0, 2000.0, 4000.0])
    (100, 2.0, 0)
    """
    residuals = [peak.allocated_bytes - traced for peak, traced in zip(peaks, traced_bytes, strict=True)]
    slope, _ = statistics.linear_regression([peak.num_tokens for peak in peaks], residuals)
    bytes_per_token = max(0.0, slope)
    above = [residual - bytes_per_token * peak.num_tokens for peak, residual in zip(peaks, residuals, strict=True)]
    constant = max(0.0, *above)
    return round(constant), bytes_per_token, round(max(constant - value for value in above))


def _cuda_card(device_index: int) -> "CudaCard":
    if not torch.cuda.is_available():
        raise InputError("`tune-adaptive calibrate` must run on a machine with CUDA, but this one has no CUDA device.")
    count = torch.cuda.device_count()
    if not 0 <= device_index < count:
        raise InputError(f"`device_index` must be in [0, {count}), but is {device_index} instead.")
    return CudaCard(torch.device("cuda", device_index))


class CudaCard(MeasuredCard):
    """A CUDA device that this process has not used before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def describe(self) -> dict[str, str]:
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "default"
        return {
            "gpu": torch.cuda.get_device_name(self._device),
            "driver": get_nvidia_driver_version(run) or "unknown",
            "torch": torch.__version__,
            "backend": f"{torch.cuda.get_allocator_backend()}, {settings}",
        }

    def outside_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes - torch.cuda.memory_reserved(self._device)

    def outside_bytes_in_a_group(self) -> int:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented, but not in `__all__`
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=self._device)
        try:
            dist.all_reduce(torch.zeros(1, device=self._device))
            return self.outside_bytes()
        finally:
            dist.destroy_process_group()

    def workspace_bytes(self) -> int:
        before_bytes = torch.cuda.memory_allocated(self._device)
        matrix = torch.zeros(4096, 4096, dtype=torch.bfloat16, device=self._device, requires_grad=True)
        (matrix @ matrix).sum().backward()
        del matrix
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device) - before_bytes

    def train(self, loop: CalibrationLoop, batch_size: int) -> StepPeak:
        with self._device:
            model, tokens_BS = loop.build_model(), loop.make_batch(batch_size)
        optimizer = loop.build_optimizer(model)
        for _ in range(_WARM_UP_STEPS):
            loop.train_step(model, optimizer, tokens_BS)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        loop.train_step(model, optimizer, tokens_BS)
        allocated_bytes = torch.cuda.max_memory_allocated(self._device)
        reserved_bytes = torch.cuda.max_memory_reserved(self._device)
        num_tokens = tokens_BS.numel()
        del model, optimizer, tokens_BS
        free_memory(self._device)
        return StepPeak(num_tokens, allocated_bytes, reserved_bytes)

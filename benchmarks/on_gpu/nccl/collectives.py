"""Whether collectives give what they must."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.cuda import nccl

from benchmarks.on_gpu.nccl import group
from benchmarks.on_gpu.stage import Section, Stage
from torchtune_adaptive.text import format_bytes

HEADER = ["collective", "ranks", "numbers per rank", "differ from what they must be", "first call, ms", "later, ms"]
NUMBERS = (1000, 2**20)
_CALLS = 5
Collective = Callable[[torch.Tensor], torch.Tensor]


class Found(NamedTuple):
    """The result of a collective on this rank, and the seconds of its calls."""

    result: torch.Tensor
    seconds: list[float]


def numbers(rank: int, count: int, device: torch.device) -> torch.Tensor:
    """What a rank gives. Sums over ranks are exact in float32."""
    return torch.arange(count, dtype=torch.float32, device=device) % 1000 + 7 * rank


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Each collective with few and many numbers."""
    group.start(stage)
    ranks, device = dist.get_world_size(), stage.device
    rows: list[list[str]] = []
    for count in NUMBERS:
        given = [numbers(rank, count, device) for rank in range(ranks)]
        whole, total = torch.cat(given), torch.stack(given).sum(0)
        own_part = slice(dist.get_rank() * count // ranks, (dist.get_rank() + 1) * count // ranks)
        expected = {"all-reduce": total, "reduce-scatter": total[own_part], "all-gather": whole}
        for name, collective in {"all-reduce": reduced, "reduce-scatter": scattered, "all-gather": gathered}.items():
            found = _calls(collective, given[dist.get_rank()], device)
            wrong = group.of_all_ranks(int((found.result != expected[name]).sum()))
            differ = f"{sum(wrong)} of {ranks * expected[name].numel()}" if stage.has_values else "not computed"
            times = [f"{1e3 * found.seconds[0]:.1f}", f"{1e3 * median(found.seconds[1:]):.1f}"]
            rows.append([name, str(ranks), str(count), differ, *times])
    text = ["Sums of these numbers are exact in float32."]
    if not stage.is_rehearsal:
        text.append(_device_text())
    if dist.get_rank() == 0:
        yield [Section(title=f"Collectives of {ranks} ranks", header=HEADER, rows=rows, text=text)]
    dist.barrier()


def reduced(own: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' numbers."""
    dist.all_reduce(result := own.clone())
    return result


def scattered(own: torch.Tensor) -> torch.Tensor:
    """This rank's part of the sum."""
    result = own.new_empty(len(own) // dist.get_world_size())
    dist.reduce_scatter_tensor(result, own)
    return result


def gathered(own: torch.Tensor) -> torch.Tensor:
    """The numbers of all ranks."""
    result = own.new_empty(len(own) * dist.get_world_size())
    dist.all_gather_into_tensor(result, own)
    return result


def _calls(collective: Collective, own: torch.Tensor, device: torch.device) -> Found:
    seconds: list[float] = []
    result = own
    for _ in range(1 + _CALLS):
        started = time.perf_counter()
        result = collective(own)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return Found(result, seconds)


def _device_text() -> str:
    """NCCL's version, and what all ranks use outside of torch's allocator. A collective."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    outside_bytes = total_bytes - free_bytes - sum(group.of_all_ranks(torch.cuda.memory_reserved()))
    version = ".".join(map(str, nccl.version()))
    return (
        f"NCCL {version}; outside of torch's allocators all processes on the device use {format_bytes(outside_bytes)}."
    )

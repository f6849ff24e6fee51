"""Trainers of Hugging Face recover from errors of torch's own allocator for CUDA, on the simulated GPU."""

# pyright: reportMissingImports=false

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_alone, run_on_ranks

pytest.importorskip("trl", reason="`make simulated-gpu` runs this file")

from datasets import Dataset

from tests.integrations import trainers
from tests.integrations.trainers import BATCH, Outcome, difference, make, trained, without_memory

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

HOSTS = ("trainer", "sft", "dpo", "reward")  # PEFT refuses LoRA beside the torchao that torchtune needs
LENGTH = 256  # tokens


def _rows(host: str) -> Any:
    """As many tokens in each row, so that memory runs out in the first step."""
    if host == "trainer":
        return [{"input_ids": [3 + (seed + place) % 61 for place in range(LENGTH)]} for seed in range(96)]
    texts = [" ".join(f"w{3 + (seed + place) % 61}" for place in range(LENGTH)) for seed in range(96)]
    if host == "sft":
        return Dataset.from_list([{"text": text} for text in texts])
    pairs = zip(texts, reversed(texts), strict=True)
    return Dataset.from_list([{"prompt": "w5", "chosen": f" {one}", "rejected": f" {other}"} for one, other in pairs])


def _train(host: str, sharding: str, *, size: int, limit: int | None = None) -> tuple[Outcome, int]:
    """Train with micro-batches of ``size`` samples; ``limit`` in bytes. Also returns the peak of reserved bytes."""
    gc.collect()  # of the trainer before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / total)
    lengths: dict[str, Any] = {} if host == "trainer" else {"max_length": 2 * LENGTH}
    options: dict[str, Any] = {"micro_batch_size": size, "train_dataset": _rows(host)}
    trainer = make(host, sharding=sharding, use_cpu=False, options=options, dropout=0.0, **lengths)
    return trained(trainer), torch.cuda.max_memory_reserved()


def recoveries(rank: int, sharding: str) -> dict[str, Any]:
    """Of each host: its events, how often memory ran out, and how training differs from one told the smaller size."""
    if dist.is_initialized():
        trainers.on_rank(rank)
    else:
        torch.cuda.device_count = lambda: 1  # with more, the trainer would use DataParallel
    found = {}
    for host in HOSTS:
        (_, high), (told, low) = (_train(host, sharding, size=size) for size in (BATCH, BATCH // 2))
        is_limited = not dist.is_initialized() or rank == 1
        ours, _ = _train(host, sharding, size=BATCH, limit=low + (high - low) // 4 if is_limited else None)
        found[host] = ours.events, ours.logs[0]["memory/retries"], difference(without_memory(ours), told)
    return found


def expected(*steps: int) -> dict[str, Any]:
    """The micro-batch is halved in these steps, of which the first is logged."""
    return dict.fromkeys(HOSTS, ([(step, BATCH, BATCH // 2) for step in steps], 1, (0.0, {})))


def test_one_process() -> None:
    """The size has never fitted, so it is not tried again in this epoch."""
    assert run_alone(recoveries, 0, "") == expected(1)


@pytest.mark.parametrize("sharding", ["", "load"], ids=["ddp", "fsdp2"])
def test_two_ranks(sharding: str) -> None:
    """The size has fitted on the other rank, so it is tried again in the next step."""
    assert run_on_ranks(recoveries, 2, sharding) == [expected(1, 2)] * 2

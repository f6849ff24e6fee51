"""Trainers of Hugging Face recover from errors of torch's own allocator for CUDA, on the simulated GPU."""

# pyright: reportMissingImports=false

import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_alone, run_on_ranks

pytest.importorskip("trl", reason="`make simulated-gpu` runs this file")

from datasets import Dataset
from trl.kernels import chunked_logprob

from tests.integrations import trainers
from tests.integrations.trainers import BATCH, Outcome, difference, make, trained, without_memory

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

HOSTS = ("trainer", "sft", "packed", "dpo", "reward")  # PEFT refuses LoRA beside the torchao that torchtune needs
LENGTH = 256  # tokens


def _rows(host: str) -> Any:
    """As many tokens in each row, so that memory runs out in the first step."""
    if host == "trainer":
        return [{"input_ids": [3 + (seed + place) % 61 for place in range(LENGTH)]} for seed in range(96)]
    texts = [" ".join(f"w{3 + (seed + place) % 61}" for place in range(LENGTH)) for seed in range(96)]
    if host in ("sft", "packed"):
        return Dataset.from_list([{"text": text} for text in texts])
    pairs = zip(texts, reversed(texts), strict=True)
    return Dataset.from_list([{"prompt": "w5", "chosen": f" {one}", "rejected": f" {other}"} for one, other in pairs])


def _make(host: str, sharding: str, *, size: int | None, fp16: bool) -> Any:
    """A trainer with micro-batches of ``size`` samples; None: one without recovery."""
    lengths: dict[str, Any] = {} if host == "trainer" else {"max_length": 2 * LENGTH}
    options: dict[str, Any] = {"train_dataset": _rows(host)} | ({} if size is None else {"micro_batch_size": size})
    how: dict[str, Any] = {"sharding": sharding, "use_cpu": False, "fp16": fp16, "dropout": 0.0, **lengths}
    return make(host, is_adaptive=size is not None, options=options, **how)


def _train(host: str, sharding: str, *, size: int | None, limit: int | None = None, fp16: bool) -> tuple[Outcome, int]:
    """Train under ``limit``, in bytes. Also returns the peak of reserved bytes."""
    gc.collect()  # of the trainer before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / total)
    trainer = _make(host, sharding, size=size, fp16=fp16)
    return trained(trainer), torch.cuda.max_memory_reserved()


def _begin(rank: int) -> None:
    chunked_logprob._MM_OUT_DTYPE = False  # products of float16 as float32, which no CPU computes
    if dist.is_initialized():
        trainers.on_rank(rank)
    else:
        torch.cuda.device_count = lambda: 1  # with more, the trainer would use DataParallel


def recoveries(rank: int, sharding: str, fp16: bool) -> dict[str, Any]:
    """Of each host: its events, how often memory ran out, and how training differs: whole from one without recovery,
    and with errors from one that is told the smaller size.
    """
    _begin(rank)
    found = {}
    for host in HOSTS:
        plain, whole, told = (_train(host, sharding, size=size, fp16=fp16) for size in (None, BATCH, BATCH // 2))
        is_limited = not dist.is_initialized() or rank == 1
        limit = told[1] + (whole[1] - told[1]) // 4 if is_limited else None
        ours, _ = _train(host, sharding, size=BATCH, limit=limit, fp16=fp16)
        differences = difference(whole[0], plain[0]), difference(without_memory(ours), told[0])
        found[host] = ours.events, ours.logs[0]["memory/retries"], *differences
    return found


def expected(*steps: int) -> dict[str, Any]:
    """The micro-batch is halved in these steps, of which the first is logged."""
    return dict.fromkeys(HOSTS, ([(step, BATCH, BATCH // 2) for step in steps], 1, (0.0, {}), (0.0, {})))


@pytest.mark.parametrize("fp16", [False, True], ids=["float32", "fp16"])
def test_one_process(fp16: bool) -> None:
    """The size has never fitted, so it is not tried again in this epoch."""
    assert run_alone(recoveries, 0, "", fp16) == expected(1)


@pytest.mark.parametrize("fp16", [False, True], ids=["float32", "fp16"])
@pytest.mark.parametrize("sharding", ["", "load"], ids=["ddp", "fsdp2"])
def test_two_ranks(sharding: str, fp16: bool) -> None:
    """The size has fitted on the other rank, so it is tried again in the next step."""
    assert run_on_ranks(recoveries, 2, sharding, fp16) == [expected(1, 2)] * 2


def overflowing(rank: int) -> tuple[float | None, list[bool]]:
    """A training in which all gradients overflow: what its trials have found, and whether its norms are finite."""
    _begin(rank)
    trainer = _make("trainer", "", size=BATCH // 2, fp16=True)
    trainer.accelerator.scaler._init_scale = 2.0**24
    norms = [log["grad_norm"] for log in trained(trainer).logs if "grad_norm" in log]
    return trainer._batches.factor, [math.isfinite(one) for one in norms]


def test_a_trial_tells_although_all_gradients_overflow() -> None:
    assert run_alone(overflowing, 0) == (1.0, [False] * trainers.STEPS)

"""Memory runs out within NCCL: nobody can know whether the collective was issued, so the run ends on every rank."""

import textwrap
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.on_gpu.nccl import group
from benchmarks.on_gpu.nccl.shortage import take_all
from benchmarks.on_gpu.stage import Section, Stage
from tests.support.faults import ShardedTrainee
from torchtune_adaptive import RecoverableStep

HEADER = ["rank", "raised", "seconds", "sentence"]
_SENTENCE_CHARS, _ROWS = 300, 4
_LARGEST_BYTES, _SMALLEST_BYTES = 2**34, 2**21


def measure(stage: Stage) -> Iterator[list[Section]]:
    """In the second step the device is full when a group's first collective makes NCCL set itself up."""
    group.start(stage, timeout_s=20.0)
    trainee, late = ShardedTrainee(warm_steps=0), dist.new_group()
    given, taken = torch.ones(8, device=stage.device), list[torch.Tensor]()
    is_full = False

    def micro_step(batch: list[Any]) -> torch.Tensor:
        if is_full:
            dist.all_reduce(given, group=late)
        inputs, targets = (torch.stack(column) for column in zip(*batch, strict=True))
        loss_sum = F.cross_entropy(trainee.model(inputs), targets, reduction="sum")
        loss_sum.backward()
        return loss_sum.detach()

    step = RecoverableStep(trainee.model, micro_step, micro_batch_size=_ROWS, optimizer=trainee.optimizer)
    samples = list(zip(*trainee.batch(_ROWS), strict=True))
    step(samples)
    trainee.optimizer.zero_grad()
    is_full = True
    if not (stage.is_rehearsal or stage.is_simulated) and dist.get_rank() == 1:
        taken += take_all(_LARGEST_BYTES, stage.device, smallest_bytes=_SMALLEST_BYTES)
    group.of_all_ranks(len(taken))  # the device is full before any rank goes on
    started, raised, sentence = time.perf_counter(), "nothing", ""
    try:
        step(samples)
    except Exception as error:  # which of them is what is measured
        raised, sentence = type(error).__name__, textwrap.shorten(str(error), _SENTENCE_CHARS)
    mine = [str(dist.get_rank()), raised, f"{time.perf_counter() - started:.1f}", sentence]
    rows = group.of_all_ranks(mine)
    text = ["A model's first collective of another group, while rank 1 holds all memory of the device."]
    if stage.is_rehearsal or stage.is_simulated:
        text.append("NCCL takes memory of a real card only: here the device is not full, and the step must succeed.")
    if dist.get_rank() == 0:
        yield [Section(title="Memory runs out within NCCL", header=HEADER, rows=rows, text=text)]

"""A recipe whose allocator really runs out of memory on one rank, as in ``recovery``, but with FSDP2's collectives."""

from collections.abc import Iterator

import torch.distributed as dist

from benchmarks.on_gpu import ranks, recovery
from benchmarks.on_gpu.nccl import group
from benchmarks.on_gpu.stage import Section, Stage


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Train with memory running out, and again with the same micro-batches set."""
    group.start(stage)
    seen = ranks.seen_by_all(stage, shard=None)
    text = [recovery.about(stage), *(f"{event}." for event in seen["events"])]
    if dist.get_rank() == 0:
        yield [
            Section(
                title="A recipe, out of memory on one of its ranks",
                header=recovery.HEADER,
                rows=[recovery.cells(seen, has_values=stage.has_values)],
                text=text,
                data=[seen],
            )
        ]
    dist.barrier()

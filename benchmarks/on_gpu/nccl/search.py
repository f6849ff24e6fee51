"""A search with a vote of all ranks before each collective."""

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.on_gpu.nccl import group
from benchmarks.on_gpu.stage import Section, Stage
from tests.support.faults import ShardedTrainee, same_bits
from torchtune_adaptive import SearchResult, find_max_batch_size
from torchtune_adaptive.engine.search.options import Strategy
from torchtune_adaptive.text import format_bytes

HEADER = ["strategy", "limits of the ranks", "found on the ranks", "one more", "probes", "out of memory", "seconds"]
HEADER += ["tensors that differ afterwards"]
STRATEGIES: tuple[Strategy, ...] = ("linear_extrapolation", "binary_search")
_MIB = 2**20


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Search with each strategy for the largest batch of a small model under FSDP2."""
    group.start(stage)
    # A sample has many rows, because CUDA's allocator gives 2 MiB or more at once.
    sample_rows, limit_bytes = (64, 8 * _MIB) if stage.is_rehearsal else (4096, 512 * _MIB)
    limit_bytes -= dist.get_rank() * limit_bytes // (2 * dist.get_world_size())
    limits = ", ".join(map(format_bytes, group.of_all_ranks(limit_bytes)))
    trainee = ShardedTrainee()
    rows: list[list[str]] = []
    for strategy in STRATEGIES:
        before, started = _state(trainee), time.perf_counter()
        found = find_max_batch_size(
            trainee.train,
            lambda samples: trainee.batch(sample_rows * samples),
            model=trainee.model,
            optimizer=trainee.optimizer,
            memory_limit=limit_bytes,
            strategy=strategy,
        )
        seconds = time.perf_counter() - started
        differ = [not same_bits([one], [other]) for one, other in zip(before, _state(trainee), strict=True)]
        of_ranks = group.of_all_ranks((found.batch_size, sum(differ), len(differ)))
        sizes, wrong, tensors = zip(*of_ranks, strict=True)
        probes = [str(len(found.probes)), str(sum(not probe.fits for probe in found.probes))]
        cells = [strategy, limits, ", ".join(map(str, sizes)), one_more(found), *probes, f"{seconds:.1f}"]
        rows.append([*cells, f"{sum(wrong)} of {sum(tensors)}"])
        text = [
            "`find_max_batch_size` on a small model under FSDP2; a batch counts samples of"
            f" {sample_rows} rows. *One more*: a probe of one sample more. *Tensors*: parameters, the optimizer's state"
            " and random generators, bit for bit."
        ]
        if dist.get_rank() == 0:
            yield [Section(title="A search on two ranks", header=HEADER, rows=rows, text=text)]
    dist.barrier()


def one_more(found: SearchResult) -> str:
    """Whether one sample more was tried, and fits."""
    tried = [probe.fits for probe in found.probes if probe.batch_size == found.exact_batch_size + 1]
    return {True: "fits", False: "does not fit"}[tried[0]] if tried else "not tried"


def _state(trainee: ShardedTrainee) -> list[torch.Tensor]:
    generators: Any = [torch.get_rng_state()]
    if torch.cuda.is_available():
        generators.append(torch.cuda.get_rng_state())
    return [*trainee.state(), *generators]

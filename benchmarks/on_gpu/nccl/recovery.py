"""One rank's allocator runs out of memory in a step: do all ranks train on as if told the smaller micro-batches?"""

import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from benchmarks.on_gpu.nccl import group
from benchmarks.on_gpu.nccl.shortage import PHASES, shortage
from benchmarks.on_gpu.nccl.tensor_parallel import TensorParallel
from benchmarks.on_gpu.stage import Section, Stage
from tests.support.faults import same_bits
from tests.support.recovery_trials import Case, Trials

HEADER = ["training", "ranks", "without memory in", "what happened", "micro-batches", "tensors that differ", "left"]
HEADER += ["seconds"]
ROWS = 2  # of a micro-batch; halved after an error
FAILING_RANK = 1
_ERROR_CHARS = 110


class OwnTrials(Trials):
    """``Trials`` whose last micro-step gets the fault."""

    @property
    def faulty(self) -> int:
        """The number of that micro-step."""
        return self.case.accumulation - 1


Trainee: TypeAlias = OwnTrials | TensorParallel


def trainees(ranks: int) -> dict[str, Callable[[], Trainee]]:
    """What is trained on so many ranks, the most important first."""
    cases = {
        2: {
            "FSDP2": Case(),
            "FSDP2, reduced once": Case(reduce="last", accumulation=2),
            "DDP": Case(ddp=True, accumulation=2),
        },
        4: {"HSDP, 2 x 2": Case(hsdp=True)},
    }[ranks]
    own: dict[str, Callable[[], Trainee]] = {name: lambda case=case: OwnTrials(case) for name, case in cases.items()}
    return own | ({"tensor parallelism": TensorParallel} if ranks == 2 else {})


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Each kind of training, with an error in each phase."""
    group.start(stage)
    ranks = dist.get_world_size()
    rows: list[list[str]] = []
    how = "an error is raised in its place" if stage.is_rehearsal else "its allocator has no memory left from there on"
    text = [
        f"Two optimizer steps of a small model. In the first one rank {FAILING_RANK} is without memory: {how}, until"
        f" the micro-step has ended. *Tensors that differ*, over all ranks, bit for bit from a run that was told the"
        " smaller micro-batches: parameters and the optimizer's state; with tensor parallelism the gradients."
        " *Left*: what the failed attempt has left in FSDP2's state, gradients and activations."
    ]
    title = f"Out of memory on one of {ranks} ranks, in each phase"
    for name, make in trainees(ranks).items():
        trainee = make()
        _, expected = trainee.run(ROWS // 2)
        for phase in PHASES:
            found = _trial(stage, trainee, phase, expected)
            rows.append([name, str(ranks), phase, *_cells(found, has_values=stage.has_values)])
            if dist.get_rank() == 0:
                yield [Section(title=title, header=HEADER, rows=rows, text=text)]
    dist.barrier()


def _trial(stage: Stage, trainee: Trainee, phase: str, expected: list[torch.Tensor]) -> list[dict[str, Any]]:
    """What each rank has seen. A collective."""
    started = time.perf_counter()
    faults: Any = {trainee.faulty: shortage(phase, rank=FAILING_RANK, device=stage.device)}
    taken, state = trainee.run(ROWS, faults)
    differ = [not same_bits([one], [other]) for one, other in zip(state, expected, strict=True)]
    first = next(iter(trainee.events), None)
    happened = "nothing" if first is None else f"{first.ranks} in {first.phase}: {first.error}"
    mine = {
        "happened": textwrap.shorten(happened, _ERROR_CHARS),
        "taken": taken,
        "differ": sum(differ),
        "tensors": len(differ),
        "left": list(trainee.left),
        "seconds": time.perf_counter() - started,
    }
    return group.of_all_ranks(mine)


def _cells(found: list[dict[str, Any]], *, has_values: bool) -> list[str]:
    (happened,) = {one["happened"] for one in found} if len({one["happened"] for one in found}) == 1 else ("not alike",)
    taken = {" ".join(map(str, one["taken"])) for one in found}
    differ = f"{sum(one['differ'] for one in found)} of {sum(one['tensors'] for one in found)}"
    left = sorted({name for one in found for name in one["left"]})
    cells = [happened, " or ".join(sorted(taken)), differ if has_values else "not computed"]
    return [*cells, ", ".join(left) or "0", f"{found[0]['seconds']:.1f}"]

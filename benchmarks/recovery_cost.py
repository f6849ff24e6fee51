"""What does ``RecoverableStep`` cost a plain loop, under FSDP2 or DDP, in which memory does not run out?

    OMP_NUM_THREADS=1 python -m benchmarks.recovery_cost

Two CPU ranks, each with equal models: in each round every loop trains a step, in an order that changes, so that other
load on the machine affects all equally. A second plain loop shows how much equal loops seem to differ. All must end
with the same parameters. Prints a table and writes it to ``results/recovery_cost_cpu.md``.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.on_ranks import measured_on_ranks, no_assets
from benchmarks.provenance import provenance
from benchmarks.tables import middle, publish, table
from benchmarks.turns import turns
from tests.support.faults import same_bits
from tests.support.recipe_runs import local_parameters
from torchtune_adaptive import RecoverableStep
from torchtune_adaptive.engine.distributed.consensus import Consensus

RESULTS = Path(__file__).parent / "results" / "recovery_cost_cpu.md"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.recovery_cost"
RANKS = 2
PLAIN, OURS, EXCHANGE, PLAIN_AGAIN = VARIANTS = ("plain", "RecoverableStep", "plain, 1 exchange", "plain again")
RATIOS = tuple((other, PLAIN) for other in VARIANTS[1:])


@dataclass(frozen=True)
class Case:
    """A model of layers, what a step trains on, and in how many rounds a step is timed."""

    layers: int
    width: int
    samples: int
    micro_batch_size: int
    rounds: int
    kind: Literal["FSDP2", "FSDP2, reduced once", "DDP"] = "FSDP2"

    @property
    def name(self) -> str:
        """The step in words."""
        micro_steps = self.samples // self.micro_batch_size
        layers = f"{self.layers} layer{'s' * (self.layers > 1)} of width {self.width}"
        return f"{self.kind}: {layers}, {micro_steps} x {self.micro_batch_size} samples"


CASES = [
    Case(layers=1, width=32, samples=32, micro_batch_size=32, rounds=600),
    Case(layers=4, width=224, samples=256, micro_batch_size=256, rounds=900),
    Case(layers=4, width=128, samples=256, micro_batch_size=64, rounds=300),
    Case(layers=8, width=256, samples=1024, micro_batch_size=1024, rounds=120),
    Case(layers=4, width=128, samples=256, micro_batch_size=64, rounds=300, kind="FSDP2, reduced once"),
    Case(layers=4, width=224, samples=256, micro_batch_size=256, rounds=900, kind="DDP"),
    Case(layers=8, width=512, samples=256, micro_batch_size=256, rounds=120, kind="DDP"),
    Case(layers=8, width=512, samples=256, micro_batch_size=64, rounds=120, kind="DDP"),
]


def finish_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_sum: torch.Tensor, num_samples: int) -> None:
    """Divide gradients by the samples of all ranks, clip them, and step the optimizer. A collective.

    Args:
        loss_sum, num_samples: of this rank's samples. The gradients are means over ranks of those of the sums.
    """
    sums = torch.stack((loss_sum, torch.tensor(float(num_samples), device=loss_sum.device)))
    dist.all_reduce(sums)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(dist.get_world_size() / sums[1])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


class Loop:
    """A plain loop, whose forward and backward passes may go through ``RecoverableStep``. A collective."""

    def __init__(self, case: Case, variant: str) -> None:
        torch.manual_seed(0)
        self._case = case
        layers = [nn.Sequential(nn.Linear(case.width, 2 * case.width), nn.GELU()) for _ in range(case.layers)]
        model = nn.Sequential(*(nn.Sequential(layer, nn.Linear(2 * case.width, case.width)) for layer in layers))
        self.model: Any = DistributedDataParallel(model) if case.kind == "DDP" else model
        if case.kind != "DDP":
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._samples = torch.randn(case.samples, case.width)
        self._forward_backward: Callable[[torch.Tensor], tuple[torch.Tensor, int]] = self._micro_steps
        if variant == OURS:
            step = RecoverableStep(
                self.model,
                self._micro_step,
                micro_batch_size=case.micro_batch_size,
                optimizer=self._optimizer,
                reduce="each" if case.kind == "FSDP2" else "last",
            )
            step.dry_run(self._samples)
            self._forward_backward = step
        self._consensus = Consensus() if variant == EXCHANGE else None

    def train(self) -> None:
        """One optimizer step."""
        loss_sum, num_samples = self._forward_backward(self._samples)
        if self._consensus is not None:
            self._consensus.max_over_ranks(0)
        finish_step(self.model, self._optimizer, loss_sum, num_samples)

    def _micro_step(self, samples: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss_sum = F.mse_loss(self.model(samples), samples, reduction="sum")
        loss_sum.backward()
        return loss_sum.detach(), len(samples)

    def _micro_steps(self, samples: torch.Tensor) -> tuple[torch.Tensor, int]:
        *others, last = samples.split(self._case.micro_batch_size)
        sums = []
        if self._case.kind == "FSDP2, reduced once":
            self.model.set_requires_gradient_sync(False)
        with self.model.no_sync() if self._case.kind == "DDP" else nullcontext():
            sums += map(self._micro_step, others)
        if self._case.kind == "FSDP2, reduced once":
            self.model.set_requires_gradient_sync(True)
        sums.append(self._micro_step(last))
        losses, numbers = zip(*sums, strict=True)
        return torch.stack(losses).sum(), sum(numbers)


# By clock and variant, the times of a step in each round, on rank 0, in ms: wall time, and CPU time of its thread.
Times = dict[str, dict[str, list[float]]]


def main() -> None:
    """Measure every case and write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()  # refuses arguments
    _report(*measured_on_ranks(_measure, RANKS, CASES, make_assets=no_assets))


def _measure(_: Path, cases: list[Case]) -> list[tuple[Case, Times]]:
    return [(case, _measured(case)) for case in cases]


def _measured(case: Case) -> Times:
    """Time the steps of each variant. A collective."""
    loops = {variant: Loop(case, variant) for variant in VARIANTS}
    times: Times = {clock: {variant: [] for variant in VARIANTS} for clock in ("wall", "cpu")}
    for number, variant in turns(VARIANTS, 1 + case.rounds):
        wall, cpu = time.perf_counter(), time.thread_time()
        loops[variant].train()
        if number:  # in the first round lazy set-up is done
            times["wall"][variant].append(1e3 * (time.perf_counter() - wall))
            times["cpu"][variant].append(1e3 * (time.thread_time() - cpu))
    for loop in loops.values():
        if not same_bits(local_parameters(loop.model), local_parameters(loops[PLAIN].model)):
            raise RuntimeError("the loops ended with different parameters, so that they did not do the same work")
    return times


def _rows(case: Case, times: Times) -> list[list[str]]:
    rows = []
    for clock, by_variant in times.items():
        ratios = [
            middle([other / one for one, other in zip(by_variant[one], by_variant[other], strict=True)], digits=3)
            for one, other in RATIOS
        ]
        more_ms = [ours - plain for ours, plain in zip(by_variant[OURS], by_variant[PLAIN], strict=True)]
        plain_ms = f"{median(by_variant[PLAIN]):.1f}"
        rows.append([case.name, str(case.rounds), clock, plain_ms, *ratios, middle(more_ms)])
    return rows


def _report(measured: list[tuple[Case, Times]], run: dict[str, Any]) -> None:
    header = ["step", "rounds", "clock", f"{PLAIN}, ms"]
    header += [*(f"{one} / {other}" for one, other in RATIOS), f"{OURS} - {PLAIN}, ms per step"]
    publish(
        RESULTS,
        "What recovery costs a plain loop, CPU",
        provenance(COMMAND, **run),
        "AdamW, clipping. Under FSDP2 each layer is sharded, and the root. 'Reduced once': both loops reduce gradients"
        " in the last micro-step only, as they also do with DDP (DistributedDataParallel). All loops live in the same"
        " processes and take turns in every round; their parameters at the end are equal, bit for bit. Ratios of"
        " speeds, larger than 1 where the first is faster; median over the rounds (and its interval of 95 %"
        " confidence). By the wall's clock, and by the CPU time of rank 0's training thread, which leaves out its waits"
        f" for the other rank and which other load disturbs less. '{EXCHANGE}' is a plain loop in which the ranks"
        " exchange one number after each backward pass: on a machine with no more cores than ranks gloo's threads wait"
        f" for each other. '{PLAIN_AGAIN}' is a second plain loop: how far equal loops seem to differ.",
        table(header, [row for case, times in measured for row in _rows(case, times)]),
    )


if __name__ == "__main__":
    main()

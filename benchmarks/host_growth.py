"""Does host memory grow with every optimizer step under FSDP2, by leaks of torch or of this package?

    OMP_NUM_THREADS=1 python -m benchmarks.host_growth
    OMP_NUM_THREADS=1 python -m benchmarks.host_growth --soak

Trains a tiny model under FSDP2 on two CPU ranks by AdamW, whose learning rate changes in every step as it does in stock
recipes: in a plain loop and with ``RecoverableStep``, for each implementation of the optimizer. Each case runs in
processes of its own. Anonymous resident memory is read after garbage collections; the growth is the slope of a line
through these points. Then each call of a step is made many times alone, which shows the one that leaks. ``--soak``
runs a longer training in which memory runs out again and again.

Figures are those of the installed torch. They are kept by its version in ``results/host_growth_cpu.json``: run this
with one interpreter after the other. Writes all of them to ``results/host_growth_cpu.md``.
"""

import argparse
import gc
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.ranks import run_on_ranks
from torchtune_adaptive.engine.memory.resident import anonymous_bytes
from torchtune_adaptive.engine.recovery.micro_batches import Slices
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.testing import Fault, wrap_micro_steps

RESULTS = Path(__file__).parent / "results" / "host_growth_cpu.md"
FIGURES = RESULTS.with_suffix(".json")
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.host_growth"
RANKS = 2
SAMPLES = 4  # of an optimizer step and rank
WIDTH, CLASSES = 8, 3
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
}
PLAIN, OURS = LOOPS = ("plain", "RecoverableStep")
GRADIENTS, CLIP, STEP = CALLS = ("forward, backward, zero_grad", "clip_grad_norm_", "optimizer.step")
_LONGEST_S = 3600.0


@dataclass(frozen=True)
class Length:
    """Optimizer steps before the first point, points, steps between two points, and calls of each function alone."""

    warm_up: int = 600
    points: int = 7
    between: int = 100
    alone: int = 200

    def __str__(self) -> str:
        return (
            f"{self.points} points {self.between} steps apart after {self.warm_up} steps; each call {self.alone} times"
        )


SOAK = Length(warm_up=1000, points=20, between=1000)
FAULT_EVERY_STEPS = 300
TEN_THOUSAND = 10_000


@dataclass(frozen=True)
class Growth:
    """What a process gains per optimizer step and per call of each function, and how long a step takes.

    ``parameters`` is the number of tensors that the optimizer has.
    """

    implementation: str
    loop: str
    parameters: int
    bytes_per_step: float
    specs_per_step: float
    step_ms: float
    bytes_by_call: dict[str, float]
    objects_by_call: dict[str, float]


@dataclass(frozen=True)
class Soak:
    """Anonymous memory by optimizer steps done, on the rank that grew most, and how often memory ran out."""

    steps: list[int]
    anonymous_bytes: list[int]
    faults: int

    @property
    def bytes_per_step(self) -> float:
        """The slope of the line through all points."""
        return linear_regression(self.steps, self.anonymous_bytes).slope


def _sharded_model() -> nn.Module:
    """A small model under FSDP2, sharded per layer and at its root."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)]
    model = nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
    for module in [*layers, model]:
        fully_shard(module)
    return model


class TinyTraining:
    """A tiny model under FSDP2 that is trained by AdamW, with a learning rate that changes in every step.

    Args:
        recovers: run forward and backward by ``RecoverableStep``.
    """

    def __init__(self, implementation: str, *, recovers: bool, micro_batches: Any = SAMPLES) -> None:
        self._model = _sharded_model()
        generator = torch.Generator().manual_seed(dist.get_rank())
        inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        self._samples = {"inputs": inputs, "targets": torch.randint(0, CLASSES, (SAMPLES,), generator=generator)}
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, **IMPLEMENTATIONS[implementation])
        self._schedule = get_cosine_schedule_with_warmup(self._optimizer, 10, 10**6)
        self._recoverable: RecoverableStep[None] | None = None
        if recovers:
            self._recoverable = RecoverableStep(
                self._model, self._micro_step, micro_batch_size=micro_batches, optimizer=self._optimizer
            )

    @property
    def recoverable(self) -> RecoverableStep[None]:
        """The ``RecoverableStep`` that runs forward and backward; there must be one."""
        assert self._recoverable is not None
        return self._recoverable

    @property
    def parameters(self) -> int:
        """Tensors that are trained."""
        return len(list(self._model.parameters()))

    def train(self, steps: int) -> None:
        """Take ``steps`` optimizer steps. A collective."""
        for _ in range(steps):
            self._gradients()
            self._clip()
            self._step()
            self._optimizer.zero_grad()

    def calls(self) -> dict[str, Callable[[], object]]:
        """The calls that a step consists of; each can be repeated alone."""
        self._gradients()

        def gradients() -> None:
            self._optimizer.zero_grad()
            self._gradients()

        return {GRADIENTS: gradients, CLIP: self._clip, STEP: self._step}

    def _micro_step(self, samples: dict[str, torch.Tensor]) -> None:
        F.cross_entropy(self._model(samples["inputs"]), samples["targets"]).backward()

    def _gradients(self) -> None:
        if self._recoverable is None:
            self._micro_step(self._samples)
        else:
            self._recoverable(self._samples)

    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)

    def _step(self) -> None:
        self._optimizer.step()
        self._schedule.step()


def growth(implementation: str, loop: str, length: Length) -> Growth:
    """Train, and measure this rank's growth. A collective."""
    training = TinyTraining(implementation, recovers=loop == OURS)
    training.train(length.warm_up)
    specs, started = _specs(), time.perf_counter()
    steps, points = [0], [_anonymous_bytes()]
    for _ in range(length.points - 1):
        training.train(length.between)
        steps.append(steps[-1] + length.between)
        points.append(_anonymous_bytes())
    step_ms = 1e3 * (time.perf_counter() - started) / steps[-1]
    specs = _specs() - specs
    by_call = {name: _growth_of(call, length.alone) for name, call in training.calls().items()}
    return Growth(
        implementation,
        loop,
        training.parameters,
        linear_regression(steps, points).slope,
        specs / steps[-1],
        step_ms,
        {name: gained for name, (gained, _) in by_call.items()},
        {name: objects for name, (_, objects) in by_call.items()},
    )


def soak(length: Length) -> Soak:
    """Train while memory runs out every few hundred steps, at varying operations and ranks. A collective."""
    slices = Slices(SAMPLES)
    training = TinyTraining("foreach", recovers=True, micro_batches=slices)
    training.train(1)
    counted = Fault(None)
    wrap_micro_steps(training.recoverable, partial(_under, counted))
    training.train(1)
    wrap_micro_steps(training.recoverable, None)
    steps, points, done = [], [], 2
    last = length.warm_up + (length.points - 1) * length.between
    while done < last:
        training.train(1)
        done += 1
        if done % FAULT_EVERY_STEPS == 0:
            number = done // FAULT_EVERY_STEPS
            fault = Fault(7 * number % counted.count, ranks=[number % RANKS])
            wrap_micro_steps(training.recoverable, partial(_under, fault))
            training.train(1)
            wrap_micro_steps(training.recoverable, None)
            done += 1
            slices.size = SAMPLES  # so that memory can run out in it again
        if done >= length.warm_up + len(points) * length.between:
            steps.append(done)
            points.append(_anonymous_bytes())
    return Soak(steps, points, len(training.recoverable.events))


def _under(fault: Fault, number: int, run: Callable[[], None]) -> None:
    """Run the step's first micro-step under ``fault``: for ``wrap_micro_steps``."""
    with nullcontext() if number else fault:
        return run()


def _anonymous_bytes() -> int:
    gc.collect()
    found = anonymous_bytes()
    assert found is not None  # on Linux
    return found


def _specs() -> int:
    """DTensorSpec objects that are alive."""
    gc.collect()
    return sum(type(one).__name__ == "DTensorSpec" for one in gc.get_objects())


def _growth_of(call: Callable[[], object], times: int) -> tuple[float, float]:
    """Bytes and objects that each call leaves in memory."""
    for _ in range(times // 4):
        call()
    before, objects = _anonymous_bytes(), len(gc.get_objects())
    for _ in range(times):
        call()
    after = _anonymous_bytes()
    return (after - before) / times, (len(gc.get_objects()) - objects) / times


def _measure(rank: int, implementation: str, loop: str, length: Length) -> Growth:
    logging.disable(logging.WARNING)
    return growth(implementation, loop, length)


def _soak(rank: int, length: Length) -> Soak:
    logging.disable(logging.WARNING)
    return soak(length)


def measured(length: Length) -> list[Growth]:
    """The growth in each case, of the rank that grew most."""
    cases = product(IMPLEMENTATIONS, LOOPS)
    ranks = [run_on_ranks(_measure, RANKS, *case, length, timeout_s=_LONGEST_S) for case in cases]
    return [max(found, key=lambda one: one.bytes_per_step) for found in ranks]


def main() -> None:
    """Measure, keep the figures and write all that are kept."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_growth", description="Growth of host memory with steps."
    )
    parser.add_argument("--soak", action="store_true", help="a long training in which memory runs out again and again")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    started, load = time.perf_counter(), os.getloadavg()[0]
    if options.soak:
        ranks = run_on_ranks(_soak, RANKS, SOAK, timeout_s=_LONGEST_S)
        found: Any = asdict(max(ranks, key=lambda one: one.bytes_per_step))
    else:
        found = [asdict(one) for one in measured(Length())]
    run = {"ranks": f"{RANKS} gloo ranks of 1 thread", "seconds": time.perf_counter() - started, "load": load}
    part, command = ("soak", f"{COMMAND} --soak") if options.soak else ("growth", COMMAND)
    kept = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"growth": {}, "soak": {}}
    kept[part][torch.__version__] = {"found": found, "provenance": provenance(command, **run)}
    FIGURES.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    publish(report(kept), RESULTS)


def _mib(bytes_per_step: float) -> str:
    """MiB in ten thousand steps."""
    return f"{TEN_THOUSAND * bytes_per_step / 2**20:.1f}"


def _growth_row(version: str, one: Growth) -> list[str]:
    per_parameter = one.bytes_per_step / one.parameters
    figures = (f"{one.specs_per_step:.1f}", f"{per_parameter:.0f}", f"{one.step_ms:.1f}")
    return [version, one.implementation, one.loop, _mib(one.bytes_per_step), *figures]


def _call_row(version: str, one: Growth) -> list[str]:
    cells = [f"{one.bytes_by_call[call]:.0f} B, {one.objects_by_call[call]:.1f}" for call in CALLS]
    return [version, one.implementation, one.loop, *cells]


def _soak_lines(version: str, one: Soak, source: str) -> list[str]:
    above = [f"{(point - one.anonymous_bytes[0]) / 2**10:+.0f}" for point in one.anonymous_bytes]
    return [
        "",
        f"### torch {version}",
        "",
        source,
        "",
        f"Memory ran out {one.faults} times in {one.steps[-1]} steps. Anonymous memory grows by"
        f" {_mib(one.bytes_per_step)} MiB in {TEN_THOUSAND} steps, by the line through {len(one.steps)} points:",
        "",
        *table(["step", "more than at the first point, KiB"], zip(map(str, one.steps), above, strict=True)),
    ]


def report(kept: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of the document."""
    versions = sorted(kept["growth"], key=lambda version: [int(part) for part in version.partition("+")[0].split(".")])
    cases = [(version, Growth(**one)) for version in versions for one in kept["growth"][version]["found"]]
    rates = ["torch", "AdamW", "loop", "MiB in 10 000 steps", "DTensorSpecs per step", "bytes per parameter and step"]
    soaks = [(version, Soak(**one["found"]), one["provenance"]) for version, one in sorted(kept["soak"].items())]
    return [
        "# Growth of host memory with optimizer steps under FSDP2, CPU",
        "",
        *(line for version in versions for line in (f"- {kept['growth'][version]['provenance']}",)),
        "",
        f"A model of {cases[0][1].parameters if cases else 0} tensors, AdamW, a learning rate that changes in every"
        f" step, gradients clipped. Anonymous resident memory of the rank that grew most: {Length()}.",
        "",
        *table([*rates, "ms per step"], [_growth_row(version, one) for version, one in cases]),
        "",
        "What one more call leaves, made alone many times: bytes of anonymous memory, and objects that the garbage"
        " collector knows. The optimizer's step is taken with that of the schedule.",
        "",
        *table(["torch", "AdamW", "loop", *CALLS], [_call_row(version, one) for version, one in cases]),
        "",
        f"## While memory runs out every {FAULT_EVERY_STEPS} steps",
        "",
        f"`RecoverableStep` and foreach AdamW. In one step out of {FAULT_EVERY_STEPS} memory runs out on one rank, at"
        " an operation that differs from time to time; the step is run again in halves, and the next is whole again.",
        *(line for soaked in soaks for line in _soak_lines(*soaked)),
    ]


if __name__ == "__main__":
    main()

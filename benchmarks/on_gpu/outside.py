"""The memory outside torch's allocator from the search on, and a neighbour on the device that takes almost all."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.on_gpu.neighbour import Neighbour
from benchmarks.on_gpu.observed import Observed
from benchmarks.on_gpu.random_recipe import (
    apart,
    apart_text,
    compute_alike,
    events_of,
    let_go,
    live_random_recipe,
    logged,
    random_config,
    start_group,
)
from benchmarks.on_gpu.ranks import Resized
from benchmarks.on_gpu.stage import Section, Stage
from tests.support.recipe_runs import local_parameters, same_bits
from torchtune_adaptive.engine.memory.meter import device_memory_bytes
from torchtune_adaptive.plan.calibrate import CudaCard
from torchtune_adaptive.testing import ballast
from torchtune_adaptive.text import format_bytes

_STEPS, _COMES, _GOES = 8, 3, 6  # steps of each of two epochs; before which the neighbour comes, and goes
_ROOM = 0.6  # share of a step's activations that the neighbour leaves
HEADER = ["moment", "outside the allocator", "of the device", "reserved by the allocator", "of the neighbour"]


class _Crowded(Observed):
    """A neighbour comes before a step and goes before a later one. Notes what is outside the allocator."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage
        self._stack = ExitStack()
        self._neighbour: Neighbour | None = None
        self.moments: list[tuple[str, int, int, int]] = []

    def note(self, moment: str) -> None:
        taken = self._neighbour.num_bytes if self._neighbour else 0
        if self._stage.is_rehearsal:
            outside, reserved = 0, 0
        else:
            outside = CudaCard(self._stage.device).outside_bytes() - taken
            reserved = torch.cuda.memory_reserved()
        self.moments.append((moment, outside, reserved, taken))

    def before_step(self, number: int) -> None:
        if number == _COMES:
            self._comes()
        if number == _GOES:
            self.note(f"before step {number}, with the neighbour")
            self._stack.close()
        super().before_step(number)

    def after_epoch(self) -> None:
        self.note("after an epoch")

    def _comes(self) -> None:
        left = round(_ROOM * (self.peak_bytes - self.live_bytes()))
        self.note(f"before step {_COMES}")
        if self._stage.is_rehearsal:
            meter = self.recipe.trainer.step.meter
            num_bytes = max(0, meter.limit_bytes - self.live_bytes() - left)
            self._stack.enter_context(ballast(num_bytes, self._stage.device, meter=meter))
            return
        torch.cuda.empty_cache()
        self._neighbour = Neighbour()
        self._neighbour.take(leave_bytes=left)
        self._stack.callback(self._neighbour.leave)


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Search and train with the neighbour, and again without it in the same micro-batches."""
    compute_alike()
    start_group(stage)
    crowded = _Crowded(stage)
    crowded.note("a process group, no model")
    recipe = _recipe(stage, crowded, None)
    trainer = recipe.trainer
    found, steps = trainer.sizes.result, logged(recipe)
    if not stage.is_rehearsal:
        at_search = device_memory_bytes(stage.device) - found.memory_limit_bytes
        crowded.moments.append(("the search, after its warm-up", at_search, 0, 0))
    crowded.note("the search has ended")
    recipe.train()
    events = events_of(recipe)
    micro_batches = {int(step["step"]): int(step["micro_batch_size"]) for step in steps}
    parameters = local_parameters(recipe._model)
    ooms, used = trainer.recoverable.retries, found.batch_size
    del trainer
    let_go(recipe)
    resized = Resized(micro_batches)
    recipe = _recipe(stage, resized, used)
    recipe.train()
    difference = apart([step["loss"] for step in steps], [step["loss"] for step in logged(recipe)])
    same = same_bits(parameters, local_parameters(recipe._model))
    text = [
        f"Config `{stage.full}`, rows of up to {stage.seq_len} random tokens of random lengths, {used} rows a step as"
        f" the search found, {_STEPS} steps an epoch, one process, deterministic algorithms. Before step {_COMES} a"
        f" neighbour takes the device's memory past torch's allocator, but for {_ROOM:.0%} of a step's activations; it"
        f" leaves before step {_GOES}.",
        *(f"{event}." for event in events),
        f"Micro-batches by step: {' '.join(map(str, micro_batches.values()))}; {ooms} out-of-memory errors survived.",
        f"Against a run without the neighbour that has these micro-batches set: losses"
        f" {apart_text(difference)}, parameters {'equal bit for bit' if same else 'not equal'}.",
    ]
    total = device_memory_bytes(stage.device)
    rows = [
        [moment, format_bytes(outside), f"{outside / total:.2%}", format_bytes(reserved), format_bytes(taken)]
        for moment, outside, reserved, taken in crowded.moments
    ]
    data: dict[str, Any] = {"moments": crowded.moments, "ooms": ooms, "losses_apart": difference, "same": same}
    data |= {"micro_batches": micro_batches, "seconds": crowded.seconds, "resized_seconds": resized.seconds}
    yield [
        Section(title="Memory outside the allocator, and a neighbour", header=HEADER, rows=rows, text=text, data=[data])
    ]


def _recipe(stage: Stage, watch: Observed, batch_size: int | None) -> Any:
    """The recipe, which searches if ``batch_size`` is None."""
    settings: dict[str, Any] = {"memory_limit": stage.limits_bytes[-1] if stage.is_rehearsal else None}
    keys: dict[str, Any] = {"use_maximum_batch_size": True} if batch_size is None else {"batch_size": batch_size}
    cfg = random_config(
        stage,
        stage.full,
        num_rows=512,
        lengths="random",
        epochs=2,
        max_steps_per_epoch=_STEPS,
        adaptive=settings,
        **keys,
    )
    return live_random_recipe(cfg, watch=watch)

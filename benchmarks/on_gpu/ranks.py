"""One of the ranks that share a device, launched by ``recovery``.

Trains while a tensor takes memory on one rank, so that its allocator really runs out of memory: first before a forward
pass, then before a backward pass. Then trains again without it, with the resulting micro-batch sizes set in advance.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.on_gpu.observed import Observed
from benchmarks.on_gpu.random_recipe import events_of, let_go, live_random_recipe, logged, random_config
from benchmarks.on_gpu.stage import Section, Stage, compute_alike
from benchmarks.on_gpu.staged import stage_collectives
from tests.support.faults import same_bits
from tests.support.recipe_runs import local_parameters

BATCH_SIZE, EPOCHS, STEPS = 8, 2, 5  # rows per rank, steps per epoch
FORWARD_STEP, BACKWARD_STEP = 2, 4  # of the first epoch, in which the tensor is made before that phase
_ROOM = 0.75  # share of the activations that still fits: too little for all rows, enough for half of them
_NO_ROOM = 0.0  # the same, in backward


class Crowded(Observed):
    """Makes a tensor that takes memory: on rank 1 before a forward pass, on rank 0 before a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self._tensor_in_the_way: torch.Tensor | None = None
        self._fills_before_backward = False

    def before_step(self, number: int) -> None:
        rank = dist.get_rank()
        self._activations_bytes = self.peak_bytes - self.live_bytes()
        if number == FORWARD_STEP and rank == 1:
            self._fill(_ROOM)
        self._fills_before_backward = number == BACKWARD_STEP and rank == 0
        super().before_step(number)

    def before_backward(self) -> None:
        if self._fills_before_backward:
            self._fills_before_backward = False
            self._fill(_NO_ROOM)

    def after_epoch(self) -> None:
        self._tensor_in_the_way = None

    def _fill(self, room: float) -> None:
        """Leave memory for the share ``room`` of a step's activations."""
        if self.is_cuda:
            torch.cuda.empty_cache()  # memory that the allocator caches would leave no room for the tensor
        meter = self.recipe.trainer.step.meter
        # An allocator's limit is on what it has reserved, of which a little stays free in blocks that are in use.
        used_bytes = torch.cuda.memory_reserved() if self.is_cuda else self.live_bytes()
        num_bytes = max(meter.limit_bytes - used_bytes - round(room * self._activations_bytes), 0)
        self._tensor_in_the_way = torch.zeros(num_bytes, dtype=torch.uint8, device=self.recipe.parts.step.device)
        meter.count(self._tensor_in_the_way)


class Resized(Observed):
    """Sets the size of micro-batches before each step, so that memory need not run out."""

    def __init__(self, micro_batches: dict[int, int]) -> None:
        super().__init__()
        self._micro_batches = micro_batches

    def before_step(self, number: int) -> None:
        if number in self._micro_batches:
            self.recipe.trainer.micro_batches.resize(self._micro_batches[number])
        super().before_step(number)


Shard = Callable[[nn.Module], None] | None  # gets the sharded model before it computes


def random_recipe(stage: Stage, watch: Observed, *, shard: Shard) -> Any:
    """A recipe on this rank, ready to train. A collective."""
    settings = {"memory_limit": stage.rank_limit_bytes}
    model: dict[str, Any] = {"model": stage.rank_model} if stage.rank_model else {}
    cfg = random_config(
        stage,
        stage.full,
        num_rows=STEPS * BATCH_SIZE * dist.get_world_size(),
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        max_steps_per_epoch=STEPS,
        clip_grad_norm=1.0,
        adaptive=settings,
        **model,
    )
    return live_random_recipe(cfg, watch=watch, shard=shard)


def _train(stage: Stage, shard: Shard) -> dict[str, Any]:
    crowded = Crowded()
    recipe = random_recipe(stage, crowded, shard=shard)
    steps, trainer = logged(recipe), recipe.trainer
    recipe.train()
    events = events_of(recipe)
    ooms = trainer.recoverable.retries
    parameters = local_parameters(recipe._model)
    micro_batches = _micro_batches_by_step(steps)
    del trainer
    let_go(recipe)
    resized = Resized(micro_batches)
    recipe = random_recipe(stage, resized, shard=shard)
    recipe.train()
    return {
        "ranks": dist.get_world_size(),
        "ooms": ooms,
        "events": events,
        "micro_batches": micro_batches,
        "seconds": crowded.seconds,
        "resized_seconds": resized.seconds,
        "losses": [step["loss"] for step in steps],
        "resized_losses": [step["loss"] for step in logged(recipe)],
        "same_parameters": same_bits(parameters, local_parameters(recipe._model)),
    }


def _micro_batches_by_step(steps: list[dict[str, float]]) -> dict[int, int]:
    """The micro-batch sizes that rank 0 has logged, on every rank."""
    box = [{int(step["step"]): int(step["micro_batch_size"]) for step in steps}]
    dist.broadcast_object_list(box)
    return box[0]


def seen_by_all(stage: Stage, *, shard: Shard) -> dict[str, Any]:
    """What this rank has measured, but whether parameters are equal on all ranks. A collective."""
    found = _train(stage, shard)
    same = [False] * dist.get_world_size()
    dist.all_gather_object(same, found["same_parameters"])
    return found | {"same_parameters": all(same)}


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Train, and yield what rank 0 has measured, only on rank 0."""
    compute_alike()
    dist.init_process_group("gloo")
    os.environ["LOCAL_RANK"] = "0"  # all ranks are on the first device
    found = seen_by_all(stage, shard=stage_collectives)
    if dist.get_rank() == 0:
        yield [Section(title="", header=[], data=[found])]
    dist.barrier()

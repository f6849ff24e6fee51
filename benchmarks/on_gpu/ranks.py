"""One of the ranks that share a device: ``python -m benchmarks.on_gpu.ranks OUTPUT SECONDS DIRECTORY``.

Trains with a tensor in the way on one rank, so that its allocator really runs out of memory: first before a forward,
then before a backward. Then once more with nothing in the way, but told the micro-batches that came of it.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.on_gpu.observed import Observed, live_bytes
from benchmarks.on_gpu.random_recipe import let_go, live_recipe, logged, random_config
from benchmarks.on_gpu.stage import Stage, stage_for
from benchmarks.on_gpu.staged import stage_collectives
from tests.recipe_runs import local_parameters, same_bits

BATCH_SIZE, EPOCHS, STEPS = 8, 2, 5  # rows per rank, steps per epoch
FORWARD_STEP, BACKWARD_STEP = 2, 4  # of the first epoch, in which the tensor comes before that phase
_ROOM = 0.75  # of the activations that the tensor leaves no room for, so that half the rows need less
_LITTLE_ROOM = 0.02  # of them, that it leaves in backward


class Crowded(Observed):
    """With a tensor in the way: on rank 1 from before a forward on, on rank 0 from before a backward on."""

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self._backward = recipe._backward
        self._ballast: torch.Tensor | None = None
        self._limit_bytes = recipe._meter.limit_bytes

    def before(self, step: int) -> None:
        rank = dist.get_rank()
        self._activations_bytes = self.peak_bytes - live_bytes(self.recipe)
        if step == FORWARD_STEP and rank == 1:
            self._fill(self._limit_bytes - live_bytes(self.recipe) - round(_ROOM * self._activations_bytes))
        if step == BACKWARD_STEP and rank == 0:
            self.recipe._backward = self._fill_and_go_backward
        if step > STEPS:
            self._ballast = None

    def leave(self) -> None:
        """Nothing is in the way any more."""
        self._ballast = None

    def _fill_and_go_backward(self, *args: Any) -> None:
        self.recipe._backward = self._backward
        self._fill(self._limit_bytes - live_bytes(self.recipe) - round(_LITTLE_ROOM * self._activations_bytes))
        self._backward(*args)

    def _fill(self, num_bytes: int) -> None:
        device = self.recipe._device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the allocator keeps would be in the way of the tensor
        self._ballast = torch.empty(max(num_bytes, 0), dtype=torch.uint8, device=device)


class Told(Observed):
    """Told before each step how many rows fit."""

    def __init__(self, recipe: Any, micro_batches: dict[int, int]) -> None:
        super().__init__(recipe)
        self._micro_batches = micro_batches

    def before(self, step: int) -> None:
        if step in self._micro_batches:
            self.recipe._largest_micro_batch = self._micro_batches[step]


def _recipe(stage: Stage) -> Any:
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
    return live_recipe(stage, cfg, shard=stage_collectives)


def _train(stage: Stage) -> dict[str, Any]:
    crowded = Crowded(_recipe(stage))
    recipe, steps = crowded.recipe, logged(crowded.recipe)
    save = recipe._save_state

    def at_end_of_epoch() -> None:
        crowded.leave()
        save()

    recipe._save_state = at_end_of_epoch
    recipe.train()
    events = [entry for entry in recipe._report.history if "step" in entry]
    parameters = local_parameters(recipe._model)
    micro_batches = _micro_batches_by_step(steps)
    retries = recipe._oom_retries
    let_go(recipe)
    told = Told(_recipe(stage), micro_batches)
    told.recipe.train()
    same = same_bits(parameters, local_parameters(told.recipe._model))
    return {
        "ranks": dist.get_world_size(),
        "ooms": retries,
        "events": [entry["reason"] for entry in events],
        "micro_batches": micro_batches,
        "seconds": crowded.seconds,
        "told_seconds": told.seconds,
        "losses": [step["loss"] for step in steps],
        "told_losses": [step["loss"] for step in logged(told.recipe)],
        "same_parameters": same,
    }


def _micro_batches_by_step(steps: list[dict[str, float]]) -> dict[int, int]:
    """Logged by rank 0, told to all."""
    box = [{int(step["step"]): int(step["micro_batch_size"]) for step in steps}]
    dist.broadcast_object_list(box)
    return box[0]


def main() -> None:
    """Take part; rank 0 writes what was seen, as JSON."""
    output, seconds, directory = sys.argv[1:]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    os.environ["LOCAL_RANK"] = "0"  # all ranks are on the first device
    stage = stage_for(Path(directory), seconds=float(seconds))
    seen = _train(stage)
    same = [False] * dist.get_world_size()
    dist.all_gather_object(same, seen["same_parameters"])
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(seen | {"same_parameters": all(same)}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort an interpreter that shuts down


if __name__ == "__main__":
    main()

"""A small model whose layers are divided among the ranks, with recovery."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.faults import under
from tests.support.ranks import DEVICE, device_of_rank
from torchtune_adaptive import RecoverableStep
from torchtune_adaptive.engine.memory.operations import local_part
from torchtune_adaptive.engine.recovery.backoff import Backoff
from torchtune_adaptive.engine.recovery.micro_batches import Slices
from torchtune_adaptive.engine.recovery.watch import MemoryEvent
from torchtune_adaptive.testing import wrap_micro_steps

_VOCABULARY, _WIDTH, _SAMPLES, _LENGTH = 16, 8, 4, 7
_PLAN = {
    "0": RowwiseParallel(input_layouts=Replicate()),
    "1": ColwiseParallel(),
    "3": RowwiseParallel(),
    "4": ColwiseParallel(output_layouts=Replicate()),
}


class TensorParallel:
    """Two steps without an optimizer, whose gradients are the state. A collective."""

    faulty = 1

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Embedding(_VOCABULARY, _WIDTH), nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU()]
        layers += [nn.Linear(2 * _WIDTH, _WIDTH), nn.Linear(_WIDTH, _VOCABULARY)]
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("tp",))
        self._model: Any = parallelize_module(nn.Sequential(*layers).to(device_of_rank()), mesh, _PLAN)
        self._samples = (torch.arange(_SAMPLES * _LENGTH) % _VOCABULARY).reshape(_SAMPLES, _LENGTH).to(device_of_rank())
        self._micro_batches = Slices(_SAMPLES)
        self.events: list[MemoryEvent] = []
        self.left: list[str] = []
        self._step: RecoverableStep[torch.Tensor] = RecoverableStep(
            self._model,
            self._micro_step,
            micro_batch_size=self._micro_batches,
            padded_rows=lambda tokens: (len(tokens), lambda number: tokens[:1].expand(number, -1)),
            on_event=lambda event: self.events.append(event),
        )
        self._step.dry_run(self._samples[:, :4])

    def _micro_step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss_sum = F.cross_entropy(self._model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
        loss_sum.backward()
        return loss_sum.detach()

    def run(self, rows: int, faults: Any = None) -> tuple[list[int], list[torch.Tensor]]:
        """Take both steps; returns the rows of their micro-batches, and the gradients of both."""
        self.events.clear()
        taken: list[int] = []
        gradients: list[torch.Tensor] = []
        self._micro_batches.size = rows
        for number in range(2):
            wrap_micro_steps(self._step, partial(under, (faults or {}) if number == 0 else {}))
            self._step(self._samples)
            self._step.backoff = Backoff()  # which does not try the larger micro-batches again
            taken.append(self._micro_batches.size)
            gradients += [local_part(parameter.grad).clone() for parameter in self._model.parameters()]
            self._model.zero_grad()
        return taken, gradients

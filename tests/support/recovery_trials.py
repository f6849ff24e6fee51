"""Trials of recovery on a small torchtune model: a step with a fault, followed by a step without."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchtune import training
from torchtune.models.llama2 import llama2, lora_llama2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from tests.support.faults import same_bits, tensors_of, under
from tests.support.ranks import DEVICE, device_of_rank
from tests.support.toys import loop_of
from torchtune_adaptive.engine.distributed import ddp_ledger
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.fsdp_state import param_groups
from torchtune_adaptive.engine.recovery.attempts import Recovery
from torchtune_adaptive.engine.recovery.backoff import Backoff
from torchtune_adaptive.engine.recovery.dry_run import dry_run
from torchtune_adaptive.engine.recovery.micro_batches import Slices
from torchtune_adaptive.engine.recovery.optimizer_state import allocate_state
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import MemoryEvent
from torchtune_adaptive.testing import Fault, wrap_micro_steps

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"vocab_size": 24, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 8, "max_seq_len": 16}
ROWS = 2  # in a batch; halved after a fault
DDP_BUCKET_BYTES = 1024  # so that the small model has several


@dataclass(frozen=True)
class Sums:
    """The result of a micro-step, or the sum of several."""

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.loss_sum + other.loss_sum, self.num_tokens + other.num_tokens)


@dataclass(frozen=True)
class Case:
    """A configuration of model and step."""

    reshard_after_forward: bool | int = True
    checkpointing: bool = False
    accumulation: int = 1
    lora: bool = False
    bf16: bool = False
    hsdp: bool = False  # of two replicas; on two ranks nothing is sharded
    sums: bool = False  # gradients between ranks, instead of averages
    layers: int = 2
    ddp: bool = False
    reduce: Literal["each", "last"] = "each"
    timeout_s: float = 30.0  # of its collectives


@dataclass
class Tally:
    """The outcome of trials: how many points were tried, how many faults struck, and which results were wrong."""

    points: int = 0
    struck: int = 0
    wrong: list[Any] = field(default_factory=list)
    left_behind: list[Any] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether a fault struck, and everything was right."""
        return self.struck > 0 and not self.wrong and not self.left_behind


class Trials:
    """One model, and two optimizer steps that are repeated from the same initial state. A collective."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rank = dist.get_rank()
        self.device = device_of_rank()
        self.consensus = Consensus()
        self.micro_batches = Slices(ROWS)
        self.loss = CEWithChunkedOutputLoss(num_output_chunks=2)
        self.model = self._model()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.05)
        self.activations: list[weakref.ref[Any]] = []
        for layer in getattr(self.model, "module", self.model).layers:
            layer.register_forward_hook(lambda *hooked: self.activations.append(weakref.ref(hooked[-1])))
        self.windows = [self._window(seed) for seed in range(2)]
        allocate_state(self.optimizer)
        self._saved = self.state()
        gc.freeze()

    @cached_property
    def recoverable(self) -> "RecoverableStep[Sums]":
        """The optimizer step as in a training loop. Its first use is a collective."""
        options: Any = {"on_event": self._note, "reduce": self.case.reduce}
        step = RecoverableStep(self.model, self.micro_step, micro_batch_size=self.micro_batches, **options)
        with mock.patch.object(ddp_ledger, "BUCKET_BYTES", DDP_BUCKET_BYTES):
            step.dry_run(self.windows[0][0])
        return step

    @cached_property
    def recovery(self) -> Recovery:
        """The recovery of such a step, for tests of its parts; never use both. Its first use is a collective."""
        micro_steps = [partial(self.micro_step, self.windows[0][0][:rows]) for rows in (1, ROWS)]
        return dry_run(loop_of(self.model, self.consensus), [micro_steps]).recovery

    def _model(self) -> Any:
        torch.manual_seed(0)
        if self.case.lora:
            options: dict[str, Any] = {
                "lora_rank": 2,
                "lora_alpha": 4.0,
                "lora_dropout": 0.1,
                "apply_lora_to_mlp": True,
            }
            model = lora_llama2(["q_proj", "v_proj"], num_layers=self.case.layers, **options, **SIZES)
            set_trainable_params(model, get_adapter_params(model))
        else:
            model = llama2(num_layers=self.case.layers, attn_dropout=0.1, **SIZES)
        with torch.no_grad():
            for parameter in model.parameters():  # LoRA starts with zeros, which would hide some gradients
                parameter.copy_(0.3 * torch.randn_like(parameter))
        if self.case.bf16:
            model = model.to(torch.bfloat16)
        model = model.to(self.device)
        if self.case.checkpointing:
            training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
        model.set_num_output_chunks(2)
        if self.case.ddp:
            return DistributedDataParallel(model, process_group=self._mesh().get_group())
        training.shard_model(
            model,
            [lambda name, module: isinstance(module, TransformerSelfAttentionLayer)],
            cpu_offload=False,
            reshard_after_forward=self.case.reshard_after_forward,  # pyright: ignore[reportArgumentType]
            dp_mesh=self._mesh(),
        )
        if self.case.sums:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide in a sum
        return model

    def _mesh(self) -> DeviceMesh:
        if self.case.hsdp:
            shape = (2, dist.get_world_size() // 2)
            return init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard"))
        group = dist.new_group(timeout=timedelta(seconds=self.case.timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        return DeviceMesh.from_group(group, DEVICE)

    def _window(self, seed: int) -> list[list[torch.Tensor]]:
        """Rows whose length differs by rank."""
        generator = torch.Generator().manual_seed(100 * self.rank + seed)
        length = 6 + 2 * self.rank
        rows = torch.randint(0, SIZES["vocab_size"], (self.case.accumulation * ROWS, length), generator=generator)
        return [list(batch) for batch in rows.to(self.device).split(ROWS)]

    def micro_step(self, rows: Sequence[torch.Tensor]) -> Sums:
        """Forward, loss and backward of one micro-batch."""
        tokens = torch.stack(list(rows))
        logits = self.model(tokens)
        num_tokens = torch.tensor(tokens.numel(), device=self.device)
        loss_sum = self.loss(logits, tokens) * num_tokens
        loss_sum.backward()
        return Sums(loss_sum.detach(), num_tokens)

    def attempt(self, window: list[list[torch.Tensor]], rows: int, faults: dict[int, Fault]) -> Sums | None:
        """The sum of the micro-steps of ``window``, with ``faults`` by micro-step; None if a rank ran out of memory."""

        cuts = (batch[start : start + rows] for batch in window for start in range(0, len(batch), rows))
        runs = (partial(self.micro_step, rows) for rows in cuts)
        micro_steps = [partial(under, faults, number, run) for number, run in enumerate(runs)]
        attempt = self.recovery.attempt(micro_steps)
        assert (attempt.result is None) == attempt.ran_out
        return attempt.result

    def step(self, window: list[list[torch.Tensor]], rows: int, faults: dict[int, Fault] | None = None) -> int:
        """Take an optimizer step over ``window``; returns the rows of the micro-batches that succeeded."""
        self.micro_batches.size = rows
        wrap_micro_steps(self.recoverable, partial(under, faults or {}))
        num_tokens = self.recoverable([row for batch in window for row in batch]).num_tokens.clone()
        dist.all_reduce(num_tokens)
        training.scale_grads(self.model, dist.get_world_size() / num_tokens)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.micro_batches.size

    def _note(self, event: MemoryEvent) -> None:
        self.events.append(event)
        self.left += self._left_behind()

    def state(self) -> list[torch.Tensor]:
        """Copies of this rank's trained parameters and optimizer state."""
        return [tensor.clone() for tensor in tensors_of(self.model, self.optimizer)]

    @torch.no_grad()
    def rewind(self) -> None:
        """Restore the initial state."""
        for tensor, saved in zip(tensors_of(self.model, self.optimizer), self._saved, strict=True):
            tensor.copy_(saved)
        torch.manual_seed(1000 + self.rank)
        self.activations.clear()
        self.left: list[str] = []
        self.events: list[MemoryEvent] = []

    def run(self, rows: int, faults: dict[int, Fault] | None = None) -> tuple[list[int], list[torch.Tensor]]:
        """Run both steps, with faults in the first; returns the rows of their micro-batches, and the final state."""
        self.rewind()
        taken = [self.step(self.windows[0], rows, faults)]
        self.recoverable.backoff = Backoff()  # which does not try the larger micro-batches again
        taken.append(self.step(self.windows[1], taken[0]))
        return taken, self.state()

    @cached_property
    def expected(self) -> list[torch.Tensor]:
        """The final state of a run that is told the smaller micro-batches. Its first use is a collective."""
        return self.run(ROWS // 2)[1]

    def operations(self, micro_step: int, *, kind: Any = "operation") -> int:
        """The number of places for a fault in a micro-step, the smallest of all ranks."""
        fault = Fault(None, kind=kind)
        self.run(ROWS, faults={micro_step: fault})
        return self.consensus.min_over_ranks(fault.count)

    def _left_behind(self) -> list[str]:
        """What a failed attempt left behind in FSDP2's state, in gradients or in memory."""
        return ["activations" for activation in self.activations if activation() is not None] + left_behind(self.model)

    def tally(self, points: Sequence[dict[int, int]], micro_step: int = 0, *, kind: Any = "operation") -> Tally:
        """Try ``points``. Each says which ranks fail in ``micro_step``, and at which place."""
        expected, tally = self.expected, Tally()
        for point in points:
            tally.points += 1
            fault = Fault(point.get(self.rank), kind=kind)
            taken, state = self.run(ROWS, faults={micro_step: fault})
            tally.struck += taken[0] < ROWS
            if self.left:
                tally.left_behind.append((point, self.left))
            if taken != [ROWS // 2] * 2 or not same_bits(state, expected):
                tally.wrong.append(point)
        return tally


def left_behind(model: torch.nn.Module) -> list[str]:
    """What a failed attempt left behind in FSDP2's state and in gradients."""
    left: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if state._training_state.name != "IDLE" or state._state_ctx.post_backward_final_callback_queued:
            left.append(f"{name}: state {state._training_state.name}")
        if state._comm_ctx.all_gather_state or state._comm_ctx.post_forward_order:
            left.append(f"{name}: communication")
        for group in param_groups([state]):
            if group._training_state.name != "IDLE" or group._sharded_state.name != "SHARDED":
                left.append(f"{name}: group {group._training_state.name} {group._sharded_state.name}")
            if group._all_gather_result or group._post_forward_indices or group._partial_reduce_output is not None:
                left.append(f"{name}: group under way")
            for parameter in group.fsdp_params:
                if any(output.untyped_storage().nbytes() for output in parameter.all_gather_outputs):
                    left.append(f"{name}: gathered parameters")
                unsharded = getattr(parameter, "_unsharded_param", None)
                if parameter.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None:
                    left.append(f"{name}: unsharded gradients")
    if isinstance(model, FSDPModule):
        left += [f"{name} is unsharded" for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    return left + [f"{name} has a gradient" for name, p in model.named_parameters() if p.grad is not None]


def every(places: int, pattern: str, stride: int = 1) -> list[dict[int, int]]:
    """Points at every ``stride``-th of ``places``. ``pattern``: "0", "1", "both", "all" (four ranks) or "turns"."""
    points = []
    for number, place in enumerate(range(0, places, stride)):
        everybody = {rank: (place * (1 + 6 * rank) + 13 * rank) % places for rank in range(4)}
        chosen = ("0", "1", "both")[number % 3] if pattern == "turns" else pattern
        ranks = {"both": (0, 1), "all": (0, 1, 2, 3)}.get(chosen) or (int(chosen),)
        points.append({rank: everybody[rank] if len(ranks) > 1 else place for rank in ranks})
    return points

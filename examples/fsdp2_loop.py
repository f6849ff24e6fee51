"""A plain FSDP2 loop that finds its micro-batch size and recovers from out-of-memory errors."""

import os
import random
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from torchtune_adaptive import RecoverableStep, find_max_batch_size

VOCABULARY, DIM, LONGEST_TOKENS, PADDING = 64, 32, 32, -100
SAMPLES_PER_STEP = 8  # on each rank, for any size of micro-batches
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), *layers, nn.Linear(DIM, VOCABULARY)).to(DEVICE)
    for module in [*layers, model]:
        fully_shard(module)
    return model


def make_samples(number: int) -> list[list[int]]:
    """This rank's texts for optimizer step ``number``, as tokens."""
    chance = random.Random(1000 * number + dist.get_rank())
    return [chance.choices(range(VOCABULARY), k=chance.randint(2, LONGEST_TOKENS)) for _ in range(SAMPLES_PER_STEP)]


def micro_step(model: nn.Module, samples: list[list[int]]) -> Tensor:
    """Forward and backward pass of a micro-batch. Returns [loss, tokens], which are summed over micro-batches."""
    rows = [sample + [PADDING] * (max(map(len, samples)) - len(sample)) for sample in samples]
    tokens = torch.tensor(rows, device=DEVICE)  # [B, S]
    inputs, labels = tokens[:, :-1].clamp(min=0).flatten(), tokens[:, 1:].flatten()
    loss_sum = cross_entropy(model(inputs), labels, ignore_index=PADDING, reduction="sum")
    loss_sum.backward()
    return torch.stack([loss_sum.detach(), (labels != PADDING).sum()])


def find_micro_batch_size(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    def train_step(samples: list[list[int]]) -> None:
        for _ in range(2):  # the second micro-step needs more memory: gradients exist
            micro_step(model, samples)
        optimizer.step()

    limit = "300KiB" if DEVICE.type == "cpu" else None  # None: what the GPU has
    options = {"model": model, "optimizer": optimizer, "memory_limit": limit, "max_batch_size": SAMPLES_PER_STEP}
    return find_max_batch_size(train_step, lambda size: [[0] * LONGEST_TOKENS] * size, **options).batch_size


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: RecoverableStep[Tensor], num_steps: int) -> None:
    for number in range(num_steps):
        sums = step(make_samples(number))  # calls `micro_step` on parts, smaller ones after an out-of-memory error
        dist.all_reduce(sums)
        loss_sum, num_tokens = sums.tolist()
        for parameter in model.parameters():
            parameter.grad *= dist.get_world_size() / num_tokens  # FSDP2 has divided it by the number of ranks
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number}: loss {loss_sum / num_tokens:.3f}, micro-batch {step.micro_batch_size}")


def main() -> None:
    alone = {} if "RANK" in os.environ else {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", **alone)  # torchrun sets RANK
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    size = find_micro_batch_size(model, optimizer)
    step = RecoverableStep(model, partial(micro_step, model), micro_batch_size=size, optimizer=optimizer)
    train(model, optimizer, step, num_steps=5)


if __name__ == "__main__":
    main()

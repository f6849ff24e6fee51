"""A plain FSDP2 loop over a causal language model of ``transformers``, which recovers from out-of-memory errors."""

import os
import random
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from torchtune_adaptive import RecoverableStep

SAMPLES_PER_STEP = 8  # on each rank, for any size of micro-batches
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")


def make_model() -> LlamaForCausalLM:
    """A tiny model; use ``LlamaForCausalLM.from_pretrained`` for a real one."""
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=0.1, use_cache=False)
    model = LlamaForCausalLM(config).to(DEVICE).train()
    for module in [*model.model.layers, model]:
        fully_shard(module)
    return model


def make_samples(number: int) -> list[list[int]]:
    """This rank's texts for optimizer step ``number``, as token lists of different lengths."""
    chance = random.Random(1000 * number + dist.get_rank())
    return [chance.choices(range(64), k=chance.randint(2, 16)) for _ in range(SAMPLES_PER_STEP)]


def collate(samples: list[list[int]]) -> dict[str, Tensor]:
    """Pads to the longest sample. Padding is masked in attention and in the loss."""
    padded = [sample + [-1] * (max(map(len, samples)) - len(sample)) for sample in samples]
    tokens = torch.tensor(padded, device=DEVICE)  # [B, S]
    is_padding = tokens == -1
    labels = tokens.masked_fill(is_padding, -100)
    return {"input_ids": tokens.clamp(min=0), "attention_mask": (~is_padding).long(), "labels": labels}


def micro_step(model: LlamaForCausalLM, samples: list[list[int]]) -> Tensor:
    """Forward and backward pass of a micro-batch. Returns [loss, tokens], which are summed over micro-batches."""
    batch = collate(samples)
    loss_sum = model(**batch, num_items_in_batch=1).loss  # by default it would be the mean of this micro-batch
    loss_sum.backward()
    num_tokens = (batch["labels"][:, 1:] != -100).sum()  # the model predicts all tokens of a row except the first
    return torch.stack([loss_sum.detach(), num_tokens])


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
    step = RecoverableStep(model, partial(micro_step, model), micro_batch_size=4, optimizer=optimizer)
    train(model, optimizer, step, num_steps=5)


if __name__ == "__main__":
    main()

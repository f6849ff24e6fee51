"""A trainer class in the style of torchtitan, whose ``train_step`` recovers from out-of-memory errors."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from torchtune_adaptive import RecoverableStep

VOCABULARY, DIM, IGNORED = 64, 32, -100  # IGNORED: by the loss
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Config:
    steps: int = 5
    seq_len_tokens: int = 16
    local_batch_size: int = 4  # samples of a batch from the data loader
    gradient_accumulation_steps: int = 2  # such batches per optimizer step and rank
    micro_batch_size: int = 4  # samples per micro-step, until memory runs out


class Trainer:
    def __init__(self, config: Config) -> None:
        self.config = config
        torch.manual_seed(0)  # the same weights on every rank
        layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), *layers, nn.Linear(DIM, VOCABULARY)).to(DEVICE)
        for module in [*layers, self.model]:
            fully_shard(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=config.steps)
        options = {"micro_batch_size": config.micro_batch_size, "optimizer": self.optimizer}
        self.forward_backward = RecoverableStep(self.model, self.micro_step, **options)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Endless data of this rank: inputs and labels [local_batch_size, seq_len_tokens]."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        while True:
            shape = self.config.local_batch_size, self.config.seq_len_tokens
            tokens = torch.randint(VOCABULARY, shape, generator=generator)
            padding = torch.rand(shape, generator=generator) < 0.2
            yield {"inputs": tokens, "labels": tokens.roll(-1, dims=1).masked_fill(padding, IGNORED)}

    def micro_step(self, micro_batch: dict[str, Tensor]) -> Tensor:
        """Forward and backward pass of samples: this rank's part of the mean loss over all ranks' tokens."""
        inputs, labels = (micro_batch[name].to(DEVICE).flatten() for name in ("inputs", "labels"))
        loss = cross_entropy(self.model(inputs), labels, reduction="sum") / self.global_num_tokens
        (loss * dist.get_world_size()).backward()  # FSDP2 divides gradients by the number of ranks
        return loss.detach()

    def train_step(self, data_iterator: Iterator[dict[str, Tensor]]) -> Tensor:
        batches = [next(data_iterator) for _ in range(self.config.gradient_accumulation_steps)]
        samples = {name: torch.cat([batch[name] for batch in batches]) for name in ("inputs", "labels")}
        self.global_num_tokens = (samples["labels"] != IGNORED).sum().to(DEVICE)
        dist.all_reduce(self.global_num_tokens)  # not in the micro-step, which must only have FSDP2's collectives
        loss = self.forward_backward(samples)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        return loss


def main() -> None:
    alone = {} if "RANK" in os.environ else {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", **alone)  # torchrun sets RANK
    trainer = Trainer(Config())
    data_iterator = trainer.batches()
    for _ in range(trainer.config.steps):
        print(trainer.train_step(data_iterator))


if __name__ == "__main__":
    main()

"""``transformers.Trainer`` that finds its micro-batch size and recovers from out of memory, also under FSDP2."""

import random
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from torchtune_adaptive import InputError, RecoverableStep, find_max_batch_size


class AdaptiveTrainer(Trainer):
    """An optimizer step has ``per_device_train_batch_size`` samples per device; a micro-batch has as many as fit.

    The loss is that of ``Trainer``, which divides it by the number of labels in the step on all devices.
    """

    def __init__(self, *args, micro_batch_size=None, memory_limit=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.micro_batch_size, self.memory_limit, self.step = micro_batch_size, memory_limit, None
        if self.args.gradient_accumulation_steps != 1:
            raise InputError("`gradient_accumulation_steps` must be 1: raise `per_device_train_batch_size` instead.")

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Forward and backward passes of an optimizer step. ``Trainer`` does the rest."""
        self.num_items = num_items_in_batch
        self.step = self.step or self.make_step(model, self.optimizer.optimizer)  # torch's, not accelerate's
        return self.step(inputs)

    def micro_step(self, micro_batch):
        return super().training_step(self.model_wrapped, micro_batch, self.num_items)

    def make_step(self, model, optimizer):
        if model is not self.model or self.num_items is None:
            raise InputError("The model must not be wrapped, as by DDP, and its loss must take `num_items_in_batch`.")
        size = self.micro_batch_size or self.find_micro_batch_size(model, optimizer)
        return RecoverableStep(model, self.micro_step, micro_batch_size=size, optimizer=optimizer)

    def find_micro_batch_size(self, model, optimizer):
        def train_step(samples):
            for _ in range(2):  # the second micro-step needs more memory: gradients exist
                self.micro_step(self.data_collator(samples))
            optimizer.step()

        shortest, *_, longest = sorted(self.train_dataset, key=lambda sample: len(sample["input_ids"]))
        worst = [longest] + [shortest] * self.args.per_device_train_batch_size  # padding needs a mask
        limits = {"memory_limit": self.memory_limit, "max_batch_size": len(worst) - 1}
        found = find_max_batch_size(train_step, lambda n: worst[:n], model=model, optimizer=optimizer, **limits)
        return found.batch_size


def load_model(path, world_size: int) -> LlamaForCausalLM:
    """Sharded by FSDP2 if there are several ranks."""
    sharded = {"distributed_config": DistributedConfig(fsdp_size=world_size)} if world_size > 1 else {}
    return LlamaForCausalLM.from_pretrained(path, **sharded)


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    rows = [sample["input_ids"] for sample in samples]
    tokens = torch.tensor([row + [-100] * (max(map(len, rows)) - len(row)) for row in rows])  # [B, S]
    return {"input_ids": tokens.clamp(min=0), "attention_mask": (tokens >= 0).long(), "labels": tokens}


def main() -> None:
    options = {"per_device_train_batch_size": 8, "max_steps": 5, "logging_steps": 1, "report_to": []}
    path = f"{tempfile.gettempdir()}/tiny_llama"  # the same on all ranks
    args = TrainingArguments(path, use_cpu=not torch.cuda.is_available(), save_strategy="no", **options)
    if args.process_index == 0:
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(path)
    args.distributed_state.wait_for_everyone()
    data = [{"input_ids": [1] * random.Random(i).randint(2, 16)} for i in range(64)]
    model = load_model(path, args.world_size)
    limit = "1MiB" if args.use_cpu else None  # None: what the GPU has
    AdaptiveTrainer(model, args, train_dataset=data, data_collator=collate, memory_limit=limit).train()


if __name__ == "__main__":
    main()

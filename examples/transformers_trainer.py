"""``transformers.Trainer`` that finds its micro-batch size and recovers from out of memory, also under FSDP2."""

import random
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from torchtune_adaptive.integrations.transformers import AdaptiveTrainer


class PrintEvents(TrainerCallback):
    """Any callback may have this method; without one, events are in the log."""

    def on_memory_event(self, args, state, control, event, **kwargs):
        print(f"step {event.step}: micro-batches of {event.after} samples instead of {event.before}")


def load_model(path, world_size: int) -> LlamaForCausalLM:
    """Sharded by FSDP2 if there are several ranks. Without the ``distributed_config``, ``Trainer`` uses DDP."""
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
    trainer = AdaptiveTrainer(
        load_model(path, args.world_size),
        args,
        train_dataset=[{"input_ids": [1] * random.Random(i).randint(2, 16)} for i in range(64)],
        data_collator=collate,
        callbacks=[PrintEvents()],
        memory_limit="1MiB" if args.use_cpu else None,  # None: what the GPU has
    )
    trainer.train()
    print(f"{args.per_device_train_batch_size} samples per step, at most {trainer.micro_batch_size} at once")


if __name__ == "__main__":
    main()

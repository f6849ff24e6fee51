"""Find how many padded rows fit into memory, for a causal language model of ``transformers``, in one process."""

from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from torchtune_adaptive import SearchResult, find_max_batch_size

LONGEST_TOKENS = 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model() -> LlamaForCausalLM:
    """A tiny model; use ``LlamaForCausalLM.from_pretrained`` for a real one."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0, use_cache=False)
    return LlamaForCausalLM(config).to(DEVICE)


def collate(samples: list[list[int]]) -> dict[str, Tensor]:
    """Pads to the longest sample. Padding is masked in attention and in the loss."""
    longest = max(map(len, samples))
    tokens = torch.tensor([sample + [-1] * (longest - len(sample)) for sample in samples], device=DEVICE)  # [B, S]
    is_padding = tokens == -1
    return {
        "input_ids": tokens.masked_fill(is_padding, 0),
        "attention_mask": (~is_padding).long(),
        "labels": tokens.masked_fill(is_padding, -100),
    }


def worst_batch(size: int) -> dict[str, Tensor]:
    """One row of the greatest length, and others half as long: a batch is padded to its longest row."""
    return collate([[1] * LONGEST_TOKENS] + [[1] * (LONGEST_TOKENS // 2)] * (size - 1))


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def find(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, memory_limit: str | None) -> SearchResult:
    step = partial(train_step, model, optimizer)
    return find_max_batch_size(step, worst_batch, model=model, optimizer=optimizer, memory_limit=memory_limit)


def main() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    found = find(model, optimizer, memory_limit="20MiB" if DEVICE.type == "cpu" else None)  # None: what the GPU has
    for probe in found.probes:
        print(f"{probe.batch_size} rows: {'fit' if probe.fits else 'do not fit'}, peak {probe.peak_bytes} bytes")
    print(f"batch size {found.batch_size}")


if __name__ == "__main__":
    main()

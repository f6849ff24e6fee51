"""TRL's ``SFTTrainer`` that finds its micro-batch size and recovers from out of memory: a whole program.

    python examples/trl_sft.py
    torchrun --nproc_per_node 2 examples/trl_sft.py

The model, its tokenizer and the texts are made here. To train yours, change ``model_and_tokenizer`` and ``texts``.
"""

import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from torchtune_adaptive.integrations.transformers import AdaptiveSFTTrainer

ON_GPU = torch.cuda.is_available()
WORDS = [f"word{number}" for number in range(200)]


def model_and_tokenizer():
    """Yours: ``AutoModelForCausalLM.from_pretrained(NAME)`` and ``AutoTokenizer.from_pretrained(NAME)``."""
    ids = {word: number for number, word in enumerate(["<pad>", "<unk>", "<end>", *WORDS])}
    words = Tokenizer(models.WordLevel(ids, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", eos_token="<end>")
    torch.manual_seed(0)  # the same weights in every process
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(ids), **sizes, **special)), tokenizer


def texts() -> Dataset:
    """Yours: ``load_dataset("json", data_files="my_data.jsonl", split="train")``, with a column "text"."""
    chance = random.Random(0)
    return Dataset.from_list([{"text": " ".join(chance.choices(WORDS, k=chance.randint(4, 60)))} for _ in range(256)])


def main() -> None:
    model, tokenizer = model_and_tokenizer()
    args = SFTConfig(
        "/tmp/trl_sft",
        # 16 samples per process and optimizer step: how many of them run at once is found.
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        max_steps=8,
        max_length=128,
        learning_rate=1e-3,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        bf16=ON_GPU,
        use_cpu=not ON_GPU,
    )
    trainer = AdaptiveSFTTrainer(
        model,
        args=args,
        train_dataset=texts(),
        processing_class=tokenizer,
        memory_limit=None if ON_GPU else "48MiB",  # None: what the GPU has; a CPU needs a limit for a search
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"16 samples per process and step, at most {trainer.micro_batch_size} at once")


if __name__ == "__main__":
    main()

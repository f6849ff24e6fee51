"""Does a plan of a Hugging Face model know what torch's allocator reserves in its trainer?

    PYTHONPATH=.venv-simulated-gpu/liger .venv-simulated-gpu/bin/python -m benchmarks.trainer_accuracy --output FILE

Plans the runs of ``CASES``, and trains them for three steps on a GPU, by default a simulated one, with random weights.
Needs transformers, TRL, peft, accelerate, bitsandbytes and Liger. Kernels of Triton do nothing in both, as a simulated
GPU has none; nor do those of bitsandbytes in a training. TRL's batches have at most 8192 tokens: which of them its loss
is of depends on values, which a simulated GPU has of tensors of that size only.
"""

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.apart import (
    CARD_GIB,
    Steps,
    arguments_of,
    batch_sizes,
    in_process,
    median_and_worst,
    planned_bytes,
    table_of_steps,
    write_and_end,
)
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table

COMMAND = "python -m benchmarks.trainer_accuracy"
STEPS = 3
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
ABOUT = """\
The model is that of Llama 3.2 1B, but with as many heads for keys and values as for queries. *reserved*: the most that
torch's allocator reserved in the last of three steps, in GiB; *plan*: the error of the plan for the same. *allocated*
is the error of allocated bytes. Batches of several rows are padded, if not said otherwise. A rank of DDP trains without
the others: gloo, by which ranks on simulated GPUs exchange tensors, keeps memory for a while, so that equal steps
reserved up to 10 % more in one run than in another.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer's run.

    Attributes:
        keys: of its arguments and of the model.
        sizes: whose steps are measured.
        mean_len: of `HuggingFaceRun`: by default batches are padded.
        kv_heads: the model's heads for keys and values.
    """

    trainer: str = "sft"
    keys: dict[str, Any] = field(default_factory=dict)
    seq_len: int = 1024
    ranks: int = 1
    sizes: tuple[int, ...] = (1, 3, 8)
    mean_len: int | None = None
    kv_heads: int = 32

    @property
    def by_ddp(self) -> bool:
        """Whether ranks have copies of the model."""
        return self.ranks > 1 and "fsdp" not in self.keys


_BF16 = {"dtype": "bfloat16"}
_NO_CHECKPOINTING = {"gradient_checkpointing": False}
_ALL_LAYERS = {"lora_target_modules": "all-linear"}
_LORA = _BF16 | {"use_peft": True}
_LIGER = {"use_liger_kernel": True}
_QLORA, _LORA_8BIT = _LORA | {"load_in_4bit": True}, _LORA | {"load_in_8bit": True}


def _trainer(keys: dict[str, Any], **others: Any) -> Case:
    return Case(trainer="transformers", keys=keys, sizes=(1, 2, 5), **others)


def _dpo(keys: dict[str, Any], **others: Any) -> Case:
    return Case(trainer="dpo", keys=keys, seq_len=512, **others)


CASES = {
    "SFT": Case(),
    "SFT, weights in bfloat16": Case(keys=_BF16),
    "SFT, weights in bfloat16, rows of equal length": Case(keys=_BF16, mean_len=1024),
    "SFT, no checkpointing": Case(keys=_BF16 | _NO_CHECKPOINTING),
    "SFT, accumulation": Case(keys=_BF16 | {"gradient_accumulation_steps": 4}),
    "SFT, float16": Case(keys={"fp16": True}),
    "SFT, Adafactor": Case(keys=_BF16 | {"optim": "adafactor"}),
    "SFT, LoRA": Case(keys=_LORA),
    "SFT, LoRA on all layers, rows of 4096": Case(
        keys=_LORA | _ALL_LAYERS | {"lora_r": 64}, seq_len=4096, sizes=(1, 2)
    ),
    "SFT, DoRA": Case(keys=_LORA | {"use_dora": True}),
    "SFT, LoRA and the whole head": Case(keys=_LORA | {"lora_modules_to_save": ["lm_head"]}),
    "Trainer": _trainer({"bf16": True, "gradient_checkpointing": True}),
    "Trainer, weights in bfloat16, checkpointing": _trainer(_BF16 | {"gradient_checkpointing": True}),
    "Trainer, weights in bfloat16": _trainer(_BF16),
    "Trainer, weights in bfloat16, rows of equal length": _trainer(_BF16, mean_len=1024),
    "SFT, LoRA, DDP on 2 ranks": Case(keys=_LORA, ranks=2),
    "SFT, LoRA, no checkpointing, DDP on 2 ranks": Case(keys=_LORA | _NO_CHECKPOINTING, ranks=2),
    "SFT, DDP on 2 ranks": Case(keys=_BF16, ranks=2),
    "DPO": _dpo(_BF16),
    "DPO, rows of equal length": _dpo(_BF16, mean_len=512),
    "DPO, LoRA": _dpo(_LORA),
    "DPO, LoRA, reference before training": _dpo(_LORA | {"precompute_ref_log_probs": True}),
    "SFT, QLoRA": Case(keys=_QLORA),
    "SFT, QLoRA on all layers": Case(keys=_QLORA | _ALL_LAYERS | {"use_bnb_nested_quant": True}),
    "SFT, QLoRA, no checkpointing": Case(keys=_QLORA | _NO_CHECKPOINTING),
    "SFT, LoRA on 8 bits": Case(keys=_LORA_8BIT),
    "SFT, LoRA on 8 bits, no checkpointing": Case(keys=_LORA_8BIT | _ALL_LAYERS | _NO_CHECKPOINTING),
    "SFT, 8-bit AdamW": Case(keys=_BF16 | {"optim": "adamw_8bit"}),
    "SFT, grouped heads, rows of 1021, no checkpointing": Case(
        keys=_BF16 | _NO_CHECKPOINTING, seq_len=1021, kv_heads=8
    ),
    "Trainer, grouped heads, rows of equal length": _trainer(_BF16, mean_len=1024, kv_heads=8),
    "Trainer, grouped heads in float32": _trainer({}, mean_len=1024, kv_heads=8),
    "SFT, Liger's kernels, no checkpointing": Case(keys=_BF16 | _LIGER | _NO_CHECKPOINTING),
    "SFT, LoRA, Liger's kernels": Case(keys=_LORA | _LIGER),
    "Trainer, Liger's kernels": _trainer({"bf16": True} | _LIGER),
    "Trainer, weights in bfloat16, Liger's kernels": _trainer(_BF16 | _LIGER),
    "SFT, FSDP2 on 2 ranks": Case(keys={"fsdp": True}, ranks=2),
    "SFT, LoRA, FSDP2 on 2 ranks": Case(keys=_LORA | {"fsdp": True}, ranks=2),
}


def _run(case: Case, folder: Path) -> Any:
    from torchtune_adaptive.plan.hugging_face.run import HuggingFaceRun

    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_key_value_heads": case.kv_heads}))
    return HuggingFaceRun(
        path=str(folder),
        seq_len=case.seq_len,
        trainer=case.trainer,
        keys=case.keys,
        ranks=case.ranks,
        mean_len=case.mean_len,
    )


def _planned(case: Case, folder: Path) -> dict[str, list[int]]:
    """Allocated and reserved bytes of each size."""
    from torchtune_adaptive.plan.hugging_face.tracing import RunTracer

    return planned_bytes(batch_sizes(RunTracer(_run(case, folder)).trace().step), case.sizes)


def _measured(case: Case, folder: Path, rows: int) -> list[int]:
    """The same of a real training, whose batch has so many rows."""
    import datasets
    import torch
    from transformers import HfArgumentParser, TrainerCallback

    from torchtune_adaptive.plan.hugging_face.liger import triton_does_nothing
    from torchtune_adaptive.plan.hugging_face.training import tokenizer, without_torchao
    from torchtune_adaptive.plan.hugging_face.trl_stand_ins import kernels_do_nothing

    if case.by_ddp:
        _be_one_of(case.ranks)
    _import_bitsandbytes()
    run = _run(case, folder)
    classes = run.classes

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.reset_peak_memory_stats()

    keys = dict(run.run_keys.training) | {"output_dir": str(folder), "report_to": "none", "save_strategy": "no"}
    keys |= {"max_steps": STEPS, "per_device_train_batch_size": rows, "logging_steps": 1000, "disable_tqdm": True}
    if case.trainer != "transformers":
        keys["max_length"] = case.seq_len
    parser = HfArgumentParser(classes.arguments)
    parser.set_defaults(**keys)
    (arguments,) = parser.parse_args_into_dataclasses(args=[])
    num_rows = 64 * rows * case.ranks
    options: dict[str, Any] = {}
    model = _loaded(run, "cpu" if keys.get("fsdp") else "cuda")  # FSDP2 moves its shards
    if case.trainer == "transformers":
        row = {name: [0] * case.seq_len for name in ("input_ids", "labels")} | {"attention_mask": [1] * case.seq_len}
        options["train_dataset"] = datasets.Dataset.from_list([row] * num_rows)
    elif case.trainer == "sft":
        options["train_dataset"] = datasets.Dataset.from_list([{"input_ids": [0] * case.seq_len}] * num_rows)
    else:
        answer = [0] * (case.seq_len - 1)
        pair = {"prompt_ids": [0], "chosen_ids": answer, "rejected_ids": answer}
        options["train_dataset"] = datasets.Dataset.from_list([pair] * num_rows)
        classes.trainer._prepare_dataset = lambda _, dataset, *__: dataset
        if not run.run_keys.model.use_peft:
            options["ref_model"] = _loaded(run, "cuda")
    if case.trainer != "transformers":
        options |= {"processing_class": tokenizer(), "peft_config": run.adapters}
    with without_torchao():
        trainer = classes.trainer(model=model, args=arguments, callbacks=[Watch()], **options)
    del model, options
    masks: Any = importlib.import_module("transformers.masking_utils")
    no_places = mock.patch.object(torch, "argwhere", lambda one: torch.empty(0, 1, dtype=torch.long, device=one.device))
    is_padded = run.usual_len < run.seq_len and (rows > 1 or case.trainer == "dpo")
    # A simulated GPU has no values, which tell whether rows are full and where outliers of weights in 8 bits are.
    full_rows = mock.patch.object(masks, "_ignore_causal_mask_sdpa", return_value=not is_padded)
    liger = triton_does_nothing() if keys.get("use_liger_kernel") else nullcontext()
    with kernels_do_nothing(), liger, full_rows, no_places:
        trainer.train()
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def _loaded(run: Any, device: str) -> Any:
    """The model of a run, as transformers loads it from a checkpoint."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(run.path)
    config.use_cache = False
    if run.model.quantized is None:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=run.model.dtype)
        torch.cuda.empty_cache()  # tied weights were two tensors at first, which a checkpoint's are not
        return model
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=run.model.dtype)
    own = {name: one for name, one in model.state_dict().items() if name != "lm_head.weight"}  # which is tied
    tensors = {name: torch.zeros_like(one, device="cpu") for name, one in own.items()}
    model.save_pretrained(run.path, state_dict=tensors)
    model = AutoModelForCausalLM.from_pretrained(
        run.path, quantization_config=run.model.quantized.config, dtype=run.model.dtype, device_map={"": 0}
    )
    model.config.use_cache = False
    return model


class _Library:
    """bitsandbytes' library of CUDA: its functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        def function(*_: object) -> int:
            return 0

        setattr(self, name, function)
        return function


def _import_bitsandbytes() -> None:
    import ctypes

    with mock.patch.object(ctypes.cdll, "LoadLibrary", return_value=_Library()):
        importlib.import_module("bitsandbytes")


def _be_one_of(ranks: int) -> None:
    """Be rank 0 of so many, none of which has to be there: what DDP reduces stays as it is."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    kind: Any = DistributedDataParallel
    make = kind.__init__

    def reduced(
        _: object,
        bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
    ) -> torch.futures.Future[torch.Tensor]:
        found: Any = torch.futures.Future()
        found.set_result(bucket.buffer())
        return found

    def make_without_others(model: Any, *args: Any, **options: Any) -> None:
        make(model, *args, **options)
        model.register_comm_hook(None, reduced)

    kind.__init__ = make_without_others
    number = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": 0, "LOCAL_RANK": 0}
    os.environ |= {name: str(value) for name, value in number.items()} | {"MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def _in_process(name: str, what: str, folder: Path) -> Any:
    """What a process of its own, or one for each rank, finds."""
    ranks = 1 if what == "planned" or CASES[name].by_ddp else CASES[name].ranks
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    arguments = ["--case", name, "--step", what]
    return in_process("benchmarks.trainer_accuracy", arguments, folder / "out.json", ranks=ranks, **environment)


def _report(outcomes: Sequence[Steps], output: Path, *, seconds: float) -> None:
    packages = ("torch", "transformers", "trl", "peft", "accelerate")
    cells: list[list[str]] = []
    for place, name in enumerate(("allocated", "reserved")):
        errors = [error for one in outcomes for error in one.errors(place).values()]
        cells.append([name, str(len(errors)), *median_and_worst(errors)])
    publish(
        output,
        "Plans of trainers against what torch's allocator reserves",
        provenance(COMMAND, seconds=seconds, device=f"a simulated GPU of {CARD_GIB} GiB", packages=packages),
        ABOUT,
        table(["bytes", "steps", "median", "worst"], cells),
        table_of_steps(outcomes),
    )


def main() -> None:
    arguments = arguments_of(CASES)
    if arguments.case:
        case, step = CASES[arguments.case], arguments.step
        with tempfile.TemporaryDirectory() as folder:
            found = _planned(case, Path(folder)) if step == "planned" else _measured(case, Path(folder), int(step))
        write_and_end(found, arguments.out)
    started = time.perf_counter()
    outcomes: list[Steps] = []
    with tempfile.TemporaryDirectory() as directory:
        for name in filter(None, arguments.cases.split(";")):
            try:
                planned = _in_process(name, "planned", Path(directory))
                measured = {str(rows): _in_process(name, str(rows), Path(directory)) for rows in CASES[name].sizes}
            except RuntimeError as error:
                print(f"failed: {error}", file=sys.stderr)
                continue
            outcomes.append(Steps(name, planned, measured))
            for place in (1, 0):
                print(f"{name}, {('allocated', 'reserved')[place]}: {outcomes[-1].told(place)}", file=sys.stderr)
    if arguments.output is not None:
        _report(outcomes, arguments.output, seconds=time.perf_counter() - started)


if __name__ == "__main__":
    main()

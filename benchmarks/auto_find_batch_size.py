"""An out-of-memory error in the middle of training: ``auto_find_batch_size`` of ``transformers.Trainer``, and ours.

    .venv-integrations/bin/python -m benchmarks.auto_find_batch_size

All runs train the same tiny model with 8 samples per process and step for one epoch, on a card of limited memory, whose
errors have CUDA's text. A few samples are much longer than the others, and meet one process only. The undisturbed run
has the same samples and no limit. With ``TEST_DEVICE=cuda``, one process trains a larger model on a GPU.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false

import argparse
import os
import random
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from benchmarks.peers.card import card_on
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support import ranks
from tests.support.ranks import DEVICE, run_alone, run_on_ranks
from torchtune_adaptive.engine.memory.meter import device_memory_bytes
from torchtune_adaptive.integrations.transformers import AdaptiveTrainerMixin
from torchtune_adaptive.text import count_text, parse_memory

RESULTS = Path(__file__).parent / "results"
BATCH, STEPS, LONG_STEPS = 8, 60, (25, 26, 45)  # the steps that have a long sample, counted from 1
SHOWN = (1, 10, 20, 30, 40, 50)  # the steps whose loss the table has
WAIT_S = 60  # that a rank waits for another
UNDISTURBED, THEIRS = "undisturbed, no limit", "`auto_find_batch_size`"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is trained, and on what.

    Attributes:
        title: the beginning of the sentence that says what is trained.
        card: what has the limited memory.
        limit: that memory.
        model: keys of ``LlamaConfig``.
        usual: tokens of a sample, at least and at most.
        long: tokens of a long sample.
        precision: keys of ``TrainingArguments``.
    """

    title: str
    card: str
    limit: str
    model: dict[str, int]
    usual: tuple[int, int]
    long: int
    learning_rate: float
    precision: dict[str, bool]
    world_sizes: tuple[int, ...]


SCENES = {
    "cpu": Scene(
        title="A tiny Llama is trained",
        card="which is a meter on the CPU",
        limit="6MiB",
        model={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
        usual=(8, 16),
        long=120,
        learning_rate=0.01,
        precision={"use_cpu": True},
        world_sizes=(1, 2),
    ),
    "cuda": Scene(
        title="A Llama of 0.8 billion parameters with random weights is trained with `bf16=True`",
        card="to which the allocator is limited",
        limit="32GiB",
        model={"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 32},
        usual=(256, 512),
        long=3328,
        learning_rate=1e-4,
        precision={"bf16": True},
        world_sizes=(1,),
    ),
}
SCENE = SCENES[DEVICE]
OURS: dict[str, dict[str, Any]] = {
    "ours, `micro_batch_size=8`": {"micro_batch_size": BATCH},
    "ours, searched": {"memory_limit": SCENE.limit},
}
NAMES = (UNDISTURBED, THEIRS, *OURS)
HEADER = (
    "run",
    "optimizer steps of each start",
    "samples per step at the end",
    "samples trained",
    "micro-batch",
    "largest difference of a loss",
    "end",
    "s",
)
HEAD = (
    "# An out-of-memory error in the middle of training",
    "",
    f"{SCENE.title} for one epoch of {STEPS} optimizer steps with {BATCH} samples per process and step, on a card of"
    f" {SCENE.limit}, {SCENE.card}. Steps {', '.join(map(str, LONG_STEPS))} have one much longer sample, on the last"
    " process. A start is a call of the trainer's loop: `auto_find_batch_size` begins again with fewer samples per"
    " step, and keeps the weights. The losses are those that the last start logged; the difference is from the"
    " undisturbed run at the same step.",
)
PACKAGES = ("torch", "transformers", "accelerate")
_Host: Any = object


@dataclass
class Run:
    """What one rank has seen. ``batches``: of each start, the samples per optimizer step that it has finished."""

    batches: list[list[int]] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)  # of the last start, by optimizer step
    sizes: list[str] = field(default_factory=list)  # of a micro-batch
    end: str = ""
    seconds: float = 0.0


class Watched(_Host):
    """Keeps the order of the samples, and records what happens. The base class is a trainer."""

    run: Run

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.run.batches.append([])
        return super()._inner_training_loop(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.run.batches[-1].append(len(inputs["input_ids"]))
        return loss


class Theirs(Watched, Trainer):
    """The trainer as it is."""


class Ours(Watched, AdaptiveTrainerMixin, Trainer):
    """The trainer with search and recovery."""


def rows(world_size: int) -> list[dict[str, list[int]]]:
    """Sequences with a rule that can be learnt, for one epoch. The long ones meet the last rank of ``LONG_STEPS``."""
    chance, made = random.Random(0), []
    for number in range(BATCH * STEPS * world_size):
        step, place = divmod(number, BATCH * world_size)
        is_long = step + 1 in LONG_STEPS and place == BATCH * world_size - 1
        first, stride = chance.randrange(61), chance.choice((1, 2, 5))
        length = SCENE.long if is_long else chance.randint(*SCENE.usual)
        made.append({"input_ids": [3 + (first + stride * position) % 61 for position in range(length)]})
    return made


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.tensor([sample["input_ids"] + [-100] * (longest - len(sample["input_ids"])) for sample in samples])
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": ids}  # each [B, S]


def train(rank: int, world_size: int, name: str) -> Run:
    """One run on one rank."""
    if world_size > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="localhost", MASTER_PORT="0")
        _set_pg_timeout(timedelta(seconds=WAIT_S), _get_default_group())
    transformers.logging.set_verbosity_error()
    transformers.set_seed(0)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SCENE.model))
    arguments = TrainingArguments(
        "unused",
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        learning_rate=SCENE.learning_rate,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        auto_find_batch_size=name == THEIRS,
        **SCENE.precision,
    )
    options: dict[str, Any] = {"train_dataset": rows(world_size), "data_collator": collate, **OURS.get(name, {})}
    trainer: Any = (Ours if name in OURS else Theirs)(model, arguments, **options)
    trainer.remove_callback(PrinterCallback)
    trainer.run = run = Run()
    device, limit_bytes = torch.device(DEVICE, 0 if DEVICE == "cuda" else None), parse_memory(SCENE.limit)
    card: Any = card_on(device, device_memory_bytes(device) if name == UNDISTURBED else limit_bytes)
    card.hold(model)
    started = time.monotonic()
    try:
        with card:
            trainer.train()
        run.end = "finished"
    except RuntimeError as error:  # of a rank that has waited for another
        run.end = f"{type(error).__name__} after {round((time.monotonic() - started) / 10) * 10} s"
    run.seconds = time.monotonic() - started
    run.losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    if name in OURS:
        events = [f"{event.before} -> {event.after} in step {event.step}" for event in trainer.memory_events]
        run.sizes = events or [str(trainer.micro_batch_size)]
    return run


def row(name: str, found: list[Run], undisturbed: Run) -> list[str]:
    """The table's cells for one run on all ranks. The counts are those of the last rank, which has the long samples."""
    run = found[-1]
    steps = [len(batches) for batches in run.batches]
    samples = sum(sum(batches) for one in found for batches in one.batches)
    ends = sorted({one.end for one in found})
    differences = [abs(loss - undisturbed.losses[step]) for step, loss in run.losses.items() if step <= STEPS]
    return [
        name,
        " + ".join(map(str, steps)),
        str(run.batches[-1][-1] * len(found)) if run.batches[-1] else "-",
        str(samples),
        "; ".join(run.sizes) or "-",
        f"{max(differences):.1g}" if ends == ["finished"] else "-",
        "; ".join(ends),
        f"{run.seconds:.0f}",
    ]


def main() -> None:
    """Train, print the tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--commit", help="of this tree, if it is not a repository")
    commit_name = parser.parse_args().commit
    started, load = time.monotonic(), os.getloadavg()[0]
    lines = []
    for world_size in SCENE.world_sizes:
        all_found = {}
        for name in NAMES:
            print(f"{count_text(world_size, 'rank')}: {name} ...", flush=True)
            both = world_size > 1
            all_found[name] = run_on_ranks(train, 2, 2, name) if both else [run_alone(train, 0, 1, name)]
        undisturbed = all_found[UNDISTURBED][0]
        counts = table(HEADER, (row(name, found, undisturbed) for name, found in all_found.items()))
        losses = table(
            ["loss of step", *map(str, SHOWN)],
            (
                [name, *(f"{found[0].losses[step]:.3f}" if step in found[0].losses else "-" for step in SHOWN)]
                for name, found in all_found.items()
            ),
        )
        title = "One process" if world_size == 1 else "Two processes, DistributedDataParallel"
        lines += ["", f"## {title}", "", *counts, "", *losses]
    command, gpu = ".venv-integrations/bin/python -m benchmarks.auto_find_batch_size", "no GPU"
    if DEVICE == "cuda":  # not before the ranks, which are forked
        command, gpu = f"TEST_DEVICE=cuda python{command.partition('python')[2]}", torch.cuda.get_device_name()
    seconds = time.monotonic() - started
    run = provenance(command, seconds=seconds, load=load, commit_name=commit_name, device=gpu, packages=PACKAGES)
    publish([*HEAD[:2], run, "", *HEAD[2:], *lines], RESULTS / f"auto_find_batch_size_{DEVICE}.md")


if __name__ == "__main__":
    ranks.IMPORTED_ONCE[:] = ["torchtune_adaptive.integrations.transformers"]
    main()

"""accelerate's ``find_executable_batch_size``, and the Trainer's ``auto_find_batch_size``, which rests on it."""

import importlib
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.peers.data import SEED
from benchmarks.peers.task import STEPS, Model, Task
from benchmarks.peers.watch import Attempts, Found

STARTING_BATCH_SIZE = 128  # accelerate's own default


def accelerate_finder(task: Task) -> Found:
    """Trains in the decorated function, which sets up seed, model and optimizer again each time, as in its example."""
    accelerate: Any = importlib.import_module("accelerate")
    utils: Any = importlib.import_module("accelerate.utils")
    accelerator = accelerate.Accelerator(cpu=task.device.type == "cpu")
    attempts = Attempts(task)

    @utils.find_executable_batch_size
    def train(batch_size: int) -> None:
        accelerator.free_memory()
        utils.set_seed(SEED)
        model = task.new_model()
        optimizer = task.new_optimizer(model)
        loader = DataLoader(task.rows, batch_size=batch_size, collate_fn=task.collate)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        attempts.begin(batch_size, model, optimizer)
        for _, batch in zip(range(STEPS), loader, strict=False):
            accelerator.backward(model(**task.card.place(batch)))
            optimizer.step()
            optimizer.zero_grad()

    with task.card:
        train()
    return attempts.found()


class _GivesDict(nn.Module):
    """The model as the Trainer wants it, with its loss in a dictionary."""

    def __init__(self, task: Task, model: Model) -> None:
        super().__init__()
        self._task = task
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(**self._task.card.place({"tokens": tokens, "labels": labels}))}


def trainer_finder(task: Task) -> Found:
    """``Trainer.train`` with its defaults, but with the optimizer of all contestants."""
    transformers: Any = importlib.import_module("transformers")
    model = _GivesDict(task, task.new_model())
    optimizer = task.new_optimizer(model)
    task.card.hold(model, optimizer)

    class Watch(transformers.TrainerCallback):
        """Records each start of the training."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            attempts.begin(state.train_batch_size, model, optimizer)

    with tempfile.TemporaryDirectory() as output_dir:
        arguments = transformers.TrainingArguments(
            output_dir=output_dir,
            auto_find_batch_size=True,
            per_device_train_batch_size=STARTING_BATCH_SIZE,
            max_steps=STEPS,
            use_cpu=task.device.type == "cpu",
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=task.rows,
            data_collator=task.collate,
            optimizers=(optimizer, None),
            callbacks=[Watch()],
        )
        attempts = Attempts(task)
        with task.card:
            trainer.train()
    return attempts.found()

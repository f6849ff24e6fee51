"""Lightning's BatchSizeFinder, by ``Tuner.scale_batch_size``."""

import importlib
import tempfile
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.peers.data import Batch
from benchmarks.peers.state import optimizer_state
from benchmarks.peers.task import STEPS, Model, Task
from benchmarks.peers.watch import Found, Search


def lightning_finder(task: Task, *, mode: str) -> Found:
    """Tunes, then fits with the same trainer. ``fit`` makes a new optimizer: the state of that one counts."""
    pl: Any = importlib.import_module("lightning.pytorch")
    tuning: Any = importlib.import_module("lightning.pytorch.tuner")
    module = _module(pl, task, task.new_model())
    task.card.hold(module.model)
    with tempfile.TemporaryDirectory() as root:
        trainer = pl.Trainer(
            accelerator="cpu" if task.device.type == "cpu" else "gpu",
            devices=1,
            max_steps=STEPS,
            default_root_dir=root,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        search = Search(task, module.model, None)
        with task.card:
            size = tuning.Tuner(trainer).scale_batch_size(module, mode=mode)
        found = search.over(size)
        found.survives = "yes"
        module.optimizer_states = []
        try:
            with task.card:
                trainer.fit(module)
        except torch.OutOfMemoryError:
            found.survives = f"OOM at step {task.steps - found.steps + 1}"
    if found.changed is not None and module.optimizer_states[0] != optimizer_state(None):
        found.changed.append("optimizer")
    return found


def _module(pl: Any, task: Task, model: Model) -> Any:
    class Module(pl.LightningModule):
        """The model with its optimizer and its data, whose batch size the finder scales."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.batch_size = 2
            self.optimizer_states: list[str] = []  # one for each time that training began

        def training_step(self, batch: Batch, _: int) -> torch.Tensor:
            return self.model(**task.card.place(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.new_optimizer(self.model)

        def on_train_start(self) -> None:
            self.optimizer_states.append(optimizer_state(self.optimizers(use_pl_optimizer=False)))

        def train_dataloader(self) -> Any:
            return DataLoader(task.rows, batch_size=self.batch_size, collate_fn=task.collate)

    return Module()

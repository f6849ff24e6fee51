"""Recipes that are set up and stay ready to train, whose parts a benchmark watches, probes and steps."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import training
from torchtune.training.activations import checkpoint_wrapper

from tests.support.recipe_runs import adaptive_recipe
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.search.probe import Prober
from torchtune_adaptive.engine.search.strategies import SMALL_BATCH_SIZES
from torchtune_adaptive.stock import recipe as recipe_module
from torchtune_adaptive.stock.configs import is_lora
from torchtune_adaptive.training.batch.loader import StepSamples
from torchtune_adaptive.training.batch.micro_batches import MicroBatch
from torchtune_adaptive.training.objectives import Loss
from torchtune_adaptive.training.sizes import probe_batch
from torchtune_adaptive.training.train_step import StepResult


class Watch:
    """Is called while a recipe trains. It takes the place of torchtune's profiler, whose methods it has.

    Attributes:
        recipe: the recipe, from the end of its set-up on.
    """

    recipe: Any = None

    def begin(self, recipe: Any) -> None:
        """Called at the end of the set-up."""
        self.recipe = recipe

    def start(self) -> None: ...

    def step(self) -> None:
        """Called at the end of each optimizer step."""

    def stop(self) -> None: ...

    def before_step(self, number: int) -> None:
        """Called before each optimizer step with its number, from 1. Adaptive recipes only."""

    def before_backward(self) -> None:
        """Called in each micro-step between loss and backward pass, in set-up too. Adaptive recipes only."""

    def after_epoch(self) -> None:
        """Called after each epoch."""


def kind_of(cfg: DictConfig) -> str:
    """The kind of recipe that a config is for, one of ``RECIPES``."""
    if "teacher_model" in cfg:
        return "lora_kd"
    kind = "lora" if is_lora(cfg) else "full"
    return f"{kind}_dpo" if "rlhf" in cfg.loss._component_ else kind


def live_recipe(cfg: DictConfig, recipe_class: Any = None, *, watch: Any = None) -> Any:
    """A recipe that is set up and saves no checkpoints; by default the adaptive one for ``cfg``. A collective.

    ``parts``, ``settings`` and ``consensus`` are those that an adaptive recipe's trainer was built from; a stock recipe
    has None. ``watch`` is a ``Watch``.
    """
    watch = watch or Watch()
    base: Any = recipe_class or adaptive_recipe(kind_of(cfg))

    class LiveRecipe(base):
        parts = settings = consensus = None

        def setup(self, cfg: DictConfig) -> None:
            build_trainer = recipe_module.build_trainer
            with mock.patch.object(recipe_module, "build_trainer", wraps=build_trainer) as build:
                super().setup(cfg=cfg)
            if build.called:
                self.parts, self.settings, self.consensus = build.call_args.args

        def objective(self, *, as_stock: bool) -> Callable[[Any], Loss]:
            objective = super().objective(as_stock=as_stock)

            def watched(batch: Any) -> Loss:
                loss = objective(batch)
                watch.before_backward()
                return loss

            return watched

        def before_step(self, step: int) -> None:
            watch.before_step(step + 1)
            super().before_step(step)

        def save_checkpoint(self, *_: Any, **__: Any) -> None:
            watch.after_epoch()

        def _setup_profiler(self, *args: Any, **kwargs: Any) -> Watch:
            super()._setup_profiler(*args, **kwargs)
            return watch

    training.set_seed(seed=cfg.seed)
    vars(checkpoint_wrapper).pop("_count", None)  # it counts layers over all recipes of a process
    recipe = LiveRecipe(cfg=cfg)
    if hasattr(recipe, "_checkpoint_client"):  # this recipe saves by torchtune's client
        recipe._checkpoint_client.save_checkpoint = recipe.save_checkpoint
    recipe.setup(cfg=cfg)
    watch.begin(recipe)
    return recipe


def train_again(recipe: Any, *, seed: int) -> None:
    """Train a recipe of one epoch once more, on samples in the order of ``seed``. A collective."""
    recipe.epochs_run = 0  # where a stock recipe begins
    recipe._dataloader.sampler.seed = seed
    # A stock recipe clears a device cache before it trains, which a CPU does not have; the adaptive loop skips this.
    clearing = mock.patch.object(training, "cleanup_before_training")
    with clearing, open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # its progress bar
        recipe.train()


# ---- parts of an adaptive recipe


def probe_maker(recipe: Any) -> Callable[[int], list[MicroBatch]]:
    """A function that makes a probe's micro-batches of n rows of the greatest length in training. A collective."""
    parts = recipe.parts
    row = parts.row_format.worst_case(
        parts.sampler.dataset,
        seq_len=recipe.settings.seq_len,
        tokenizer_max_seq_len=parts.tokenizer_max_seq_len,
        consensus=recipe.consensus,
    )
    return lambda rows: probe_batch(row, rows, micro_steps=parts.micro_steps)


@contextmanager
def real_steps(recipe: Any, loop: Loop, *, limit_bytes: int | None) -> Iterator[Prober]:
    """Inside, a warmed-up prober of the longest rows under ``limit_bytes``. Restores all state. A collective."""
    meter = loop.meter_for_probes()
    prober = Prober(loop, probe_maker(recipe), meter=meter, forecasts=False)
    with meter.exactly(), loop.restored() as restore_optimizers:
        meter.limit_bytes = limit_bytes
        prober.warm_up(SMALL_BATCH_SIZES[0], after_failure=restore_optimizers)
        yield prober


def timed_step(recipe: Any, samples: StepSamples) -> tuple[float, StepResult]:
    """Take an optimizer step over ``samples``: its seconds until all ranks are done, and its result. A collective."""
    dist.barrier()
    started = time.perf_counter()
    sums = recipe.trainer.recoverable(samples)
    result = StepResult.read(recipe.parts.step.finish(sums), sums)
    dist.barrier()
    return time.perf_counter() - started, result

"""The same trials for every kind of recipe: full finetuning, LoRA, DPO, distillation and QAT.

Each trial runs in a test's own process, and returns what the test makes assertions about.
"""

import contextlib
import itertools
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.faults import same_bits
from tests.support.ranks import run_alone, run_on_ranks
from tests.support.recipe_runs import (
    COMMON,
    adaptive_recipe,
    finished,
    local_parameters,
    metered_peaks,
    meters_of_recipes,
    resuming_config,
    set_up,
    stock_recipe,
    tiny_config,
    trained,
    with_micro_batches,
    without_saving,
)
from torchtune_adaptive.errors import RunEnded
from torchtune_adaptive.testing import Fault, faults_in

ROWS_THAT_FIT = 6
STRATEGIES = ("linear_extrapolation", "binary_search", "decrease_until_oom")
QUICK: dict[str, Any] = {"oom_recovery": False}  # its dry runs take a third of a short run
# Figures that the stock recipe logs of the last micro-batch only, or summed over ranks.
LOGGED_OTHERWISE = {"lora_dpo": {"loss"}, "lora_kd": {"loss", "class_loss", "kd_loss"}}


class Trials:
    """The trials of one kind of recipe, on the ranks that there are.

    Args:
        tiny_dir: the shallow assets.
        more: overrides of the config for all trials.
    """

    def __init__(self, kind: str, tiny_dir: Path, output_dir: Path, **more: Any) -> None:
        self._kind = kind
        self._more = more
        self._tiny_dir = tiny_dir
        self._directories = (output_dir / str(number) for number in itertools.count())
        self._recipe = adaptive_recipe(kind)
        self._silent = without_saving(self._recipe)  # saves nothing
        self._dropout: dict[str, Any] = {
            f"model__{'lora' if 'lora' in kind else 'attn'}_dropout": 0.1
        }  # makes random states visible

    def parity(self, accumulation: int) -> dict[str, Any]:
        """Four steps of the stock recipe and of the adaptive one."""
        cfg = self._config(gradient_accumulation_steps=accumulation, max_steps_per_epoch=4)
        stock_steps, stock_parameters, _ = finished(without_saving(stock_recipe(self._kind)), cfg)
        steps, parameters, _ = finished(self._silent, cfg)
        return {"steps": (stock_steps, steps), "parameters equal": same_bits(stock_parameters, parameters)}

    def search(self, strategies: tuple[str, ...] = STRATEGIES, **settings: Any) -> dict[str, Any]:
        """The sizes found where ``ROWS_THAT_FIT`` rows of 64 tokens fit, and whether a search restores all state.

        Args:
            settings: of the search, instead of the usual ones.
        """
        limit_bytes = self._limit_bytes()
        recipes = []
        for strategy in strategies:
            adaptive = QUICK | {"memory_limit": limit_bytes, "margin": 0.0, "power_of_two": False}
            adaptive |= {"strategy": strategy, "max_batch_size": 20} | settings
            cfg = self._config(use_maximum_batch_size=True, max_steps_per_epoch=2, adaptive=adaptive, **self._dropout)
            recipes.append(set_up(self._silent, cfg))
        searched = recipes[-1]
        after_search = everything(searched)
        steps, parameters = trained(searched)
        batch_size, timings = searched.trainer.loader.batch_size, searched.trainer.sizes.timings
        common = self._dropout | {"batch_size": batch_size, "adaptive": QUICK | {"memory_limit": limit_bytes}}
        cfg = self._config(max_steps_per_epoch=2, **common)
        told = set_up(self._silent, cfg)
        traces = differences(after_search, everything(told))
        told_steps, told_parameters = trained(told)
        return {
            "found": [recipe.trainer.sizes.result.exact_batch_size for recipe in recipes],
            "timed": None if timings is None else [limit.size for limit in timings],
            "figures": (_figures(steps), _figures(told_steps)),
            "traces": traces,
            "parameters equal": same_bits(parameters, told_parameters),
        }

    def growth(self) -> list[float]:
        """The batch sizes of a run whose batch grows by two rows at each of three epochs."""
        growing = {"_component_": "torchtune_adaptive.schedule.linear", "increment": 2}
        adaptive = QUICK | {"memory_limit": "256MiB", "max_batch_size": 6, "power_of_two": False}
        cfg = self._config(epochs=3, max_steps_per_epoch=1, batch_increase_function=growing, adaptive=adaptive)
        steps, _, _ = finished(self._silent, cfg)
        return [step["batch_size"] for step in steps]

    def recovery(self, *, points: int | None) -> dict[str, Any]:
        """A run with a fault in each step, at varying operations and ranks, and a run with the same micro-batches set.

        Args:
            points: how many faults, spread over all operations; None: every seventh operation on each rank.
        """
        count, ranks = self._operations(), dist.get_world_size() if dist.is_initialized() else 1
        if points is None:
            where = list(itertools.product(range(0, count, 7), range(ranks)))
        else:
            where = [(place * count // points, place % ranks) for place in range(points)]
        faults = {(step, 0): Fault(place, ranks=[rank]) for step, (place, rank) in enumerate(where)}
        steps_per_epoch = min(40, len(where))
        common = self._dropout | {"epochs": math.ceil(len(where) / steps_per_epoch), "adaptive__memory_limit": "2GiB"}
        common["max_steps_per_epoch"] = steps_per_epoch
        whole = with_micro_batches(self._silent, lambda step: None)  # each step begins with the largest
        with faults_in(whole, faults), _live_bytes_of(whole) as live_bytes:
            steps, parameters, recipe = finished(whole, self._config(**common))
        struck = [step for (step, _), fault in faults.items() if fault.has_struck]  # a few steps have fewer operations
        struck_anywhere = {step for steps in recipe._consensus.from_all_ranks(struck) for step in steps}
        told_class = with_micro_batches(self._silent, lambda step: 1 if step in struck_anywhere else None)
        with _live_bytes_of(told_class) as told_live_bytes:
            told_steps, told_parameters, _ = finished(told_class, self._config(**common))
        return {
            "faults": len(faults),
            "struck": len(struck_anywhere),
            "retries": recipe.trainer.recoverable.retries,
            "figures": (_figures(steps), _figures(told_steps)),
            "parameters equal": same_bits(parameters, told_parameters),
            "live bytes": (live_bytes, told_live_bytes),
        }

    def resume(self, *, within_epoch: bool) -> dict[str, Any]:
        """Two epochs of three steps in one run, and in two runs: one for each epoch, or one for the last two steps."""
        common: dict[str, Any] = self._dropout | {"epochs": 2, "max_steps_per_epoch": 3}
        common["adaptive"] = QUICK | {"memory_limit": None}
        steps, parameters, _ = finished(self._recipe, self._config(**common))
        directory = next(self._directories)
        stopped = _stopped_after_step(self._recipe, 4) if within_epoch else _stopped_after_an_epoch(self._recipe)
        with contextlib.suppress(_StopError, RunEnded):
            finished(stopped, self._config(directory, **common))
        cfg = resuming_config(self._kind, self._tiny_dir, directory, **(COMMON | self._more | common))
        resumed, resumed_parameters, _ = finished(self._recipe, cfg)
        return {
            "figures": (_figures(steps[4 if within_epoch else 3 :]), _figures(resumed)),
            "parameters equal": same_bits(parameters, resumed_parameters),
        }

    def cuts(self) -> dict[str, Any]:
        """The losses of a global batch of ten samples, cut into micro-batches in three ways."""
        ways: dict[str, tuple[int, dict[str, Any]]] = {
            "whole": (10, {}),
            "rows": (2, {}),
            "tokens": (2, {"max_tokens_per_micro_batch": 140}),
        }
        found = {}
        for name, (rows, adaptive) in ways.items():
            adaptive = QUICK | {"memory_limit": None, "global_batch_size": 10} | adaptive
            cfg = self._config(batch_size=rows, max_steps_per_epoch=2, optimizer__lr=1e-3, adaptive=adaptive)
            steps, _, recipe = finished(self._silent, cfg)
            found[name] = ([step["loss"] for step in steps], str(recipe.trainer.micro_batches.limit))
        return found

    def compiled(self) -> tuple[list[float], list[float]]:
        """The losses of three steps of eager code, and of compiled code."""
        runs = [finished(self._silent, self._config(max_steps_per_epoch=3, compile=it)) for it in (False, True)]
        eager, compiled = ([step["loss"] for step in steps] for steps, _, _ in runs)
        return eager, compiled

    def _config(self, output_dir: Any = None, **overrides: Any) -> Any:
        options = COMMON | self._more | overrides
        if "adaptive" in overrides:
            options.pop("adaptive__memory_limit")
        return tiny_config(self._kind, self._tiny_dir, output_dir or next(self._directories), **options)

    def _limit_bytes(self) -> int:
        """A limit under which ``ROWS_THAT_FIT`` rows fit and one more does not, by the peaks of metered steps."""
        recipe = set_up(self._silent, self._config(**self._dropout))
        lengths: dict[str, Any] = {"seq_len": 64, "tokenizer_max_seq_len": None, "consensus": recipe._consensus}
        row = recipe.row_format().worst_case(recipe.trainer.loader.dataset, **lengths)
        micro_steps = self._more.get("gradient_accumulation_steps", 1)
        peaks = metered_peaks(recipe, row, (1, ROWS_THAT_FIT, ROWS_THAT_FIT + 1), micro_steps=micro_steps)
        return sum(peaks[1:]) // 2

    def _operations(self) -> int:
        """The number of places for a fault in a micro-step, the smallest of all ranks and micro-steps."""
        counting = {(step, 0): Fault(None) for step in range(3)}
        with faults_in(self._silent, counting):
            _, _, recipe = finished(self._silent, self._config(max_steps_per_epoch=3, **self._dropout))
        return recipe._consensus.min_over_ranks(min(fault.count for fault in counting.values()))


def everything(recipe: Any) -> dict[str, Any]:
    """All state that a search could change, as values that can be compared."""
    models, optimizers = torch.nn.ModuleList(recipe.models()), recipe.optimizer_policy().optimizers
    trainer = recipe.trainer
    state = asdict(trainer.saver.state(epochs_run=trainer.epochs_run, step=trainer.global_step))
    loader = trainer.loader
    # Each run has an id of its own, and the backoff knows what has fitted in the search.
    told_otherwise = ("run", "reference_samples", "config", "backoff")
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    places = [(optimizer, parameter) for optimizer, group in groups for parameter in group["params"]]
    is_rank_zero = not dist.is_initialized() or dist.get_rank() == 0
    return {
        "parameters": local_parameters(models),
        "buffers": {name: buffer.clone() for name, buffer in models.named_buffers()},
        "gradients": [name for name, parameter in models.named_parameters() if parameter.grad is not None],
        "optimizer state": {
            f"{place} {name}": (value.to_local() if isinstance(value, DTensor) else value).clone()
            for place, (optimizer, parameter) in enumerate(places)
            for name, value in optimizer.state.get(parameter, {}).items()
        },
        "options": [{key: value for key, value in group.items() if key != "params"} for _, group in groups],
        "random": torch.get_rng_state().tolist(),
        "state": {name: value for name, value in state.items() if name not in told_otherwise},
        "steps": (trainer.global_step, loader.steps_per_epoch, loader.batch_size),
        "data": loader.data_loader.state_dict()["_sampler_iter_yielded"],
        "logged": list(recipe._metric_logger.steps) if is_rank_zero else [],
    }


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Where two results of ``everything`` differ."""

    def equal(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor):
            return torch.equal(one, other)
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(equal, one, other))
        return one == other

    return [name for name in right if not equal(left[name], right[name])]


def by_rank(trials: Callable[..., Any], kind: str, *arguments: Any, timeout_s: float = 600.0) -> list[Any]:
    """What ``trials(kind, *arguments)`` returns on each of two ranks, or alone for a kind of a single device."""
    if kind.endswith("_single"):
        return [run_alone(trials, kind, *arguments, timeout_s=timeout_s)]
    return run_on_ranks(_on_rank, 2, trials, kind, *arguments, timeout_s=timeout_s)


def _on_rank(rank: int, trials: Callable[..., Any], *arguments: Any) -> Any:
    return trials(*arguments)


class _StopError(Exception):
    """Ends a run after its first epoch."""


def _stopped_after_an_epoch(recipe_class: Any) -> Any:
    class Stopped(recipe_class):
        def save_checkpoint(self, epoch: int) -> None:
            super().save_checkpoint(epoch)
            raise _StopError

    return Stopped


def _stopped_after_step(recipe_class: Any, step: int) -> Any:
    class Stopped(recipe_class):
        def before_step(self, steps_done: int) -> None:
            super().before_step(steps_done)
            if steps_done == step - 1:
                signal.raise_signal(signal.SIGTERM)

        def train(self) -> None:
            with self.listening():
                super().train()

    return Stopped


@contextlib.contextmanager
def _live_bytes_of(recipe_class: Any) -> Iterator[list[int]]:
    """Inside, collects the metered bytes at the start of each step of the recipe."""
    live_bytes: list[int] = []
    before_step: Callable[..., None] = recipe_class.before_step

    def dry_recording(recipe: Any, step: int) -> None:
        live_bytes.append(meters[0].live_bytes)
        before_step(recipe, step)

    recipe_class.before_step = dry_recording
    with meters_of_recipes() as meters:
        yield live_bytes
    recipe_class.before_step = before_step


def _figures(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """The figures that are equal in two runs of the same training."""
    differ = {"tokens_per_second_per_gpu", "mfu", "oom_retries", "padding", "peak_memory_bytes", "host_memory_bytes"}
    return [{name: value for name, value in step.items() if name not in differ} for step in steps]

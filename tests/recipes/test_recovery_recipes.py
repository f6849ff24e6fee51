"""Out of memory, the recipes continue in smaller micro-batches with the same result, and log, count and record it."""

import itertools
import json
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchtune import training

from tests.recipes.test_tune_run import tune_run
from tests.support.ranks import run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    RecordingLogger,
    adaptive_recipe,
    finished,
    meters_of_recipes,
    same_bits,
    set_up,
    shallow_assets,
    tiny_config,
    with_micro_batches,
    with_sizes_fitted,
    without_saving,
)
from tests.support.run_logs import events_in
from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.errors import NothingFitsError
from torchtune_adaptive.testing import Fault, ballast, faults_in

SMALL = SHALLOW | {"tokenizer__max_seq_len": 64, "optimizer__lr": 1e-2}
UNMETERED = SMALL | {"adaptive__memory_limit": None, "log_every_n_steps": 1}


def _figures(steps: list[dict[str, float]]) -> list[tuple[float, ...]]:
    return [tuple(step[name] for name in ("step", "loss", "lr", "grad_norm", "micro_batch_size")) for step in steps]


def _faulty_and_configured(rank: int, kind: str, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    """Two epochs of four steps; rank 1 fails in backward of the first, rank 0 twice in forward of the second."""
    dropout = {"model__lora_dropout": 0.1} if kind == "lora" else {"model__attn_dropout": 0.1}
    common: dict[str, Any] = UNMETERED | dropout | {"epochs": 2, "max_steps_per_epoch": 4, "batch_size": 4}
    common["gradient_accumulation_steps"] = 2
    recipe_class = without_saving(with_sizes_fitted(adaptive_recipe(kind)))
    faults = {
        (1, 1): Fault(30, ranks=[1], phase="backward"),
        (5, 0): Fault(30, ranks=[0], phase="forward"),
        (5, 3): Fault(3, ranks=[0], phase="loss"),  # of its second attempt, with four micro-steps
    }
    with faults_in(recipe_class, faults):
        steps, parameters, recipe = finished(recipe_class, tiny_config(kind, tiny_dir, output_dir, **common))
    told = with_micro_batches(recipe_class, {1: 2, 5: 1, 6: 1, 7: 2}.get)
    told_steps, told_parameters, _ = finished(told, tiny_config(kind, tiny_dir, output_dir / "told", **common))
    return {
        "struck": [fault.has_struck for fault in faults.values()],
        "steps": (_figures(steps), _figures(told_steps)),
        "retries": [step["oom_retries"] for step in steps],
        "parameters equal": same_bits(parameters, told_parameters),
        "history": recipe.trainer.run_log.history,
        "on disk": events_in(output_dir, "sizes") if rank == 0 else None,
    }


# ---- two ranks on which something goes wrong once or repeatedly, all in one spawn


def _troubles(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    names = itertools.count()

    def config(**overrides: Any) -> Any:
        common: dict[str, Any] = UNMETERED | {"epochs": 1, "max_steps_per_epoch": 4, "batch_size": 4}
        return tiny_config("full", tiny_dir, output_dir / str(next(names)), **(common | overrides))

    return {
        "full": _faulty_and_configured(rank, "full", tiny_dir, output_dir / "full"),
        "single rows": _single_rows_fail(config(batch_size=2)),
        "in the optimizer": _optimizer_fails(config()),
        "thrashing": _thrashing(config, rank),
        "ballast": _ballast(config, rank),
        "off": _recovery_is_off(config),
        "masked rows": _masked_rows(config),
        "compiler resets": _compiler_resets(config),
    }


def _single_rows_fail(cfg: Any) -> tuple[str, int]:
    recipe_class = with_sizes_fitted(adaptive_recipe("full"))
    faults = {(2, micro_step): Fault(9, ranks=[1]) for micro_step in (0, 1)}
    with faults_in(recipe_class, faults), pytest.raises(NothingFitsError) as failure:
        finished(recipe_class, cfg)
    return str(failure.value), len(RecordingLogger.last.steps) if dist.get_rank() == 0 else 0


def _optimizer_fails(cfg: Any) -> str:
    def step(optimizer: Any, *_: Any) -> Any:
        if optimizer.state:  # the state exists when training begins
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(optimizer)

    original = torch.optim.AdamW.step
    with mock.patch.object(torch.optim.AdamW, "step", step), pytest.raises(RuntimeError) as failure:
        finished(adaptive_recipe("full"), cfg)
    return str(failure.value)


def _thrashing(config: Any, rank: int) -> dict[str, Any]:
    """An allocator on rank 1 that frees its cache in steps of four rows, and a run configured with the right size."""
    recipe_class = without_saving(with_sizes_fitted(adaptive_recipe("full")))
    retries: list[int] = []

    class Thrashing(recipe_class):
        def before_step(self, step: int) -> None:
            super().before_step(step)
            micro_batches = self.trainer.micro_batches
            if rank == 1 and micro_batches.limit == micro_batches.largest:
                retries.append(step)
            if step == 2:
                self.trainer.recoverable.backoff.next_trial = None  # otherwise four rows would be tried in this step

    limited = {"adaptive__memory_limit": "2GiB"}
    with mock.patch.object(CpuMeter, "total_retries", property(lambda _: len(retries))):
        steps, parameters, recipe = finished(Thrashing, config(**limited))
    told = with_micro_batches(recipe_class, lambda step: None if step < 2 else 2)
    told_steps, told_parameters, _ = finished(told, config(**limited))
    return {
        "micro-batches": [step["micro_batch_size"] for step in steps],
        "retries": [step["oom_retries"] for step in steps],
        "reason": [entry["reason"] for entry in recipe.trainer.run_log.history],
        "losses equal": [step["loss"] for step in steps] == [step["loss"] for step in told_steps],
        "parameters equal": same_bits(parameters, told_parameters),
    }


def _ballast(config: Any, rank: int) -> dict[str, Any]:
    """A neighbour, which stands for another process, takes memory on rank 1 in steps 2 and 3 of the first epoch."""
    neighbour = ExitStack()

    class WithNeighbour(with_sizes_fitted(adaptive_recipe("full"))):
        def before_step(self, step: int) -> None:
            super().before_step(step)
            if rank == 1 and step == 2:
                free_bytes = meters[0].limit_bytes - meters[0].live_bytes
                neighbour.enter_context(ballast(free_bytes * 3 // 5, self._device, meter=meters[0]))

        def save_checkpoint(self, epoch: int) -> None:
            neighbour.close()

    limit = {"adaptive__memory_limit": "34MiB", "epochs": 2, "batch_size": 4}
    with meters_of_recipes() as meters:
        steps, _, recipe = finished(WithNeighbour, config(**limit))
    return {
        "micro-batches": [step["micro_batch_size"] for step in steps],
        "reasons": [entry["reason"] for entry in recipe.trainer.run_log.history],
    }


def _recovery_is_off(config: Any) -> list[str]:
    """The error that ends training where recovery is disabled, and where it is impossible."""
    recipe_class = adaptive_recipe("full")
    ways: list[dict[str, Any]] = [{"adaptive__oom_recovery": False}, {"optimizer_in_bwd": True, "clip_grad_norm": None}]
    kinds = []
    for overrides in ways:
        with faults_in(recipe_class, {(1, 0): Fault(9)}), pytest.raises(torch.OutOfMemoryError) as failure:
            finished(recipe_class, config(**overrides))
        kinds.append(str(failure.value))
    return kinds


def _masked_rows(config: Any) -> tuple[int, list[float], list[float]]:
    """The number of samples cut so short that they train no token, and the losses in batches and by single rows."""
    cut_short = {"tokenizer__max_seq_len": 32, "batch_size": 8, "optimizer__lr": 1e-4}
    recipe_class = without_saving(adaptive_recipe("full"))
    steps, _, recipe = finished(recipe_class, config(**cut_short))
    told_steps, _, _ = finished(with_micro_batches(recipe_class, lambda step: 1), config(**cut_short))
    empty = [
        sample
        for batch in recipe.trainer.loader.data_loader
        for sample in batch
        if all(label == recipe._loss_fn.ignore_index for label in sample["labels"][1:])
    ]
    return len(empty), [step["loss"] for step in steps], [step["loss"] for step in told_steps]


def _compiler_resets(config: Any) -> list[int]:
    """How often the compiler is reset in a set-up with compilation, and in one without; nothing is really compiled."""
    resets = []
    for compiles in (True, False):
        with (
            mock.patch.object(training, "compile_model"),
            mock.patch.object(training, "compile_loss", lambda loss, **_: loss),
            mock.patch.object(torch.compiler, "reset") as reset,
        ):
            set_up(adaptive_recipe("full"), config(compile=compiles))
        resets.append(reset.call_count)
    return resets


@pytest.fixture(scope="module")
def troubles(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(_troubles, 2, shallow_assets(tiny_dir), tmp_path_factory.mktemp("troubles"))


def test_a_recipe_with_faults_equals_one_configured_with_the_same_micro_batches(
    troubles: list[dict[str, Any]],
) -> None:
    _check_faulty_and_configured([rank["full"] for rank in troubles])


@pytest.mark.exhaustive
def test_lora_with_faults_equals_one_configured_with_the_same_micro_batches(tiny_dir: Path, tmp_path: Path) -> None:
    assets = shallow_assets(tiny_dir)
    _check_faulty_and_configured(run_on_ranks(_faulty_and_configured, 2, "lora", assets, tmp_path))


def _check_faulty_and_configured(ranks: list[dict[str, Any]]) -> None:
    assert [rank["struck"] for rank in ranks] == [[False, True, True], [True, False, False]]
    steps, told = ranks[0]["steps"]
    assert len(told) == 8
    assert steps == told
    assert [step[-1] for step in steps] == [4, 2, 4, 4, 4, 1, 1, 2]
    assert ranks[0]["retries"] == [0, 1, 1, 1, 1, 3, 3, 3]
    assert all(rank["parameters equal"] for rank in ranks)
    history = ranks[0]["history"]
    assert [(entry["epoch"], entry["step"], entry["batch_size"], entry["micro_batch_size"]) for entry in history] == [
        (0, 2, 4, 2),
        (0, 3, 4, 4),
        (1, 6, 4, 2),
        (1, 6, 4, 1),
        (1, 8, 4, 2),
    ]
    assert history[0]["reason"].startswith("micro-batch 4 -> 2 rows: in step 2 rank 1 ran out of memory in backward (")
    assert history[1]["reason"] == "micro-batch 2 -> 4 rows: fits again in step 3"
    assert ranks[0]["on disk"] == history
    assert ranks[1]["history"] == history


def test_when_single_rows_do_not_fit_every_rank_says_the_same(troubles: list[dict[str, Any]]) -> None:
    (sentence, steps), (other, _) = (rank["single rows"] for rank in troubles)
    assert sentence == other
    assert sentence.startswith("a single row per micro-step must fit, but in step 3 rank 1 ran out of memory in ")
    assert "a fault on purpose" in sentence
    assert steps == 2


def test_out_of_memory_in_the_optimizer_ends_the_run_and_says_why(troubles: list[dict[str, Any]]) -> None:
    for rank in troubles:
        assert "out of memory in phase 'optimizer', when" in rank["in the optimizer"]
        assert "may be half updated" in rank["in the optimizer"]


def test_thrashing_on_one_rank_makes_the_next_micro_batches_smaller_and_repeats_no_step(
    troubles: list[dict[str, Any]],
) -> None:
    for rank in troubles:
        thrashing = rank["thrashing"]
        assert thrashing["parameters equal"]
        assert thrashing["losses equal"]
        (reason,) = thrashing["reason"]
        assert reason.startswith(
            "micro-batch 4 -> 2 rows: in step 2 rank 1 had to free the allocator's cache in two steps"
        )
    assert troubles[0]["thrashing"]["micro-batches"] == [4, 2, 2, 2]
    assert troubles[0]["thrashing"]["retries"] == [0] * 4


def test_a_neighbours_memory_makes_micro_batches_small_until_it_is_gone(troubles: list[dict[str, Any]]) -> None:
    sizes = troubles[0]["ballast"]["micro-batches"]
    assert sizes[:2] == [4, 4]
    assert sizes[2] == sizes[3] < 4
    assert sizes[4:] == [4] * 4
    first, *_, last = troubles[0]["ballast"]["reasons"]
    assert "in step 3 rank 1 ran out of memory in" in first
    assert "limit 34.0 MiB" in first
    assert last == f"micro-batch {sizes[3]:.0f} -> 4 rows: fits again in step 5"


def test_where_recovery_is_off_an_error_ends_the_run_as_in_the_stock_recipe(troubles: list[dict[str, Any]]) -> None:
    for rank in troubles:
        assert rank["off"] == ["CUDA out of memory (a fault on purpose)"] * 2


def test_rows_without_a_token_to_learn_from_do_not_make_the_loss_of_small_micro_batches_nan(
    troubles: list[dict[str, Any]],
) -> None:
    num_empty, losses, losses_by_row = troubles[0]["masked rows"]
    assert num_empty > 10
    assert losses_by_row == pytest.approx(losses, rel=1e-5)


def test_what_was_compiled_before_training_is_dropped(troubles: list[dict[str, Any]]) -> None:
    assert [rank["compiler resets"] for rank in troubles] == [[1, 0], [1, 0]]


# ---- by the stock command line


def _tune_run_with_faults(
    plan: dict[str, Any], ranks: int, *overrides: str, config: str, directory: Path
) -> tuple[Any, list[float]]:
    """The finished launch, and the losses it logged."""
    environment = {"FAULTY_RECIPE": json.dumps(plan)}
    arguments = [f"output_dir={directory}", "adaptive.memory_limit=null", *overrides]
    with mock.patch.dict(os.environ, environment):
        run = tune_run(
            *("--nproc_per_node", str(ranks), "faulty_recipe", "--config", config), *arguments, directory=directory
        )
    logged = "".join(path.read_text() for path in sorted((directory / "logs").glob("*.txt")))
    return run, [float(line.partition(" loss:")[2].split()[0]) for line in logged.splitlines() if " loss:" in line]


def check_tune_run_with_faults(kind: str, ranks: int, *overrides: str, config: str, directory: Path) -> None:
    """A fault in each of two epochs: status 0 and the losses of a run without."""
    losses = {}
    for name, faults in (("faulty", [[2, 0, ranks - 1, 500], [7, 0, 0, 900]]), ("fault-free", [])):
        output_dir = directory / name
        output_dir.mkdir()
        plan = {"kind": kind, "strike": "out_of_memory", "faults": faults}
        short = ("epochs=2", "max_steps_per_epoch=5")
        run, losses[name] = _tune_run_with_faults(plan, ranks, *overrides, *short, config=config, directory=output_dir)
        assert run.returncode == 0, run.stderr[-3000:]
        assert run.stderr.count("ran out of memory in") == len(faults)
    print(f"{kind}, {ranks} ranks: {losses}")
    assert len(losses["fault-free"]) == 10
    assert losses["faulty"] == pytest.approx(losses["fault-free"], rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_tune_run_ends_well_with_a_fault_in_each_epoch(kind: str, ranks: int, tiny_dir: Path, tmp_path: Path) -> None:
    check_tune_run_with_faults(kind, ranks, f"tiny_dir={tiny_dir}", config=f"tiny/{kind}", directory=tmp_path)


@pytest.mark.exhaustive
def test_when_a_rank_is_killed_the_others_end_and_it_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    plan = {"kind": "full", "strike": "kill_process", "faults": [[3, 0, 1, 700]]}
    short = (f"tiny_dir={tiny_dir}", "epochs=1")
    run, losses = _tune_run_with_faults(plan, 2, *short, config="tiny/full", directory=tmp_path)
    assert run.returncode != 0
    assert len(losses) == 3, run.stderr[-3000:]
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9 ", run.stderr)

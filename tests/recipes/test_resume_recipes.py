"""A killed run resumes from its last checkpoint as if it had never stopped; changes of its conditions are logged."""

import fcntl
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor

from tests.support.faults import same_bits
from tests.support.ranks import RanksFailedError, run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    adaptive_recipe,
    finished,
    local_parameters,
    resuming_config,
    set_up,
    shallow_assets,
    stock_recipe,
    tiny_config,
    trained,
)
from torchtune_adaptive.errors import InputError, RunEnded
from torchtune_adaptive.tiny import MODEL_NAME
from torchtune_adaptive.training.folder_lock import LOCK_NAME

# 18 samples a rank are 9 micro-batches of 2 rows: with an accumulation of 2 one is left over at the first epoch's end.
MEASURING = {"_component_": "tests.support.growth_functions.Noisy", "every_steps": 2, "min_measurements": 2}
RUN: dict[str, Any] = SHALLOW | {
    "epochs": 4,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dataset__split": "train[:36]",
    "tokenizer__max_seq_len": 64,
    "lr_scheduler__num_warmup_steps": 5,
    "batch_increase_function": MEASURING,
    "adaptive": {
        "memory_limit": "96MiB",
        "growth_limit": 4,
        "lr_scaling": "sqrt",
        "max_batch_size": 3,
        "oom_recovery": False,  # its dry runs take a third of a short run
    },
}
PLAIN: dict[str, Any] = SHALLOW | {
    "epochs": 3,
    "max_steps_per_epoch": 2,
    "batch_size": 2,
    "tokenizer__max_seq_len": 64,
    "adaptive__oom_recovery": False,
    "adaptive__memory_limit": None,
}
STOPPED_AFTER = 7  # within the third epoch
FIGURES = ("step", "batch_size", "global_batch_size", "micro_batch_size", "lr", "loss", "grad_norm", "padding")


def _die(rank: int, tiny_dir: Path, output_dir: Path) -> None:
    """A run that is killed in the middle of the third epoch."""

    class Dying(adaptive_recipe("full")):
        def before_step(self, step: int) -> None:
            if self.trainer.epochs_run == 2 and step > 6:
                os.kill(os.getpid(), signal.SIGKILL)

    finished(Dying, tiny_config("full", tiny_dir, output_dir, **RUN))


def _resume_all(rank: int, tiny_dir: Path, died_in: Path, output_dir: Path) -> dict[str, Any]:
    """A whole run, and the killed run: resumed, ended by a signal to the second rank after a step, and resumed."""

    class Stopped(adaptive_recipe("full")):
        def before_step(self, step: int) -> None:
            if (rank, step) == (1, STOPPED_AFTER - 1):
                signal.raise_signal(signal.SIGTERM)

        def train(self) -> None:
            with self.listening():
                super().train()

    ours = adaptive_recipe("full")
    whole, whole_parameters, _ = finished(ours, tiny_config("full", tiny_dir, output_dir, **RUN))
    resumed = set_up(Stopped, resuming_config("full", tiny_dir, died_in, **RUN))
    with pytest.raises(RunEnded) as end:
        resumed.train()
    saved = sorted(path.name for path in died_in.iterdir() if path.is_dir())
    steps = resumed._metric_logger.steps if rank == 0 else []
    last_steps, parameters, again = finished(ours, resuming_config("full", tiny_dir, died_in, **RUN))
    return {
        "whole": [[step[name] for name in FIGURES] for step in whole],
        "resumed": [[[step[name] for name in FIGURES] for step in some] for some in (steps, last_steps)],
        "parameters equal": same_bits(whole_parameters, parameters),
        "status": end.value.status,
        "saved": saved,
        "reasons": [entry["reason"] for entry in again.trainer.run_log.history],
    }


@pytest.fixture(scope="module")
def died_in(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("died")
    with pytest.raises(RanksFailedError) as failure:
        run_on_ranks(_die, 2, shallow_assets(tiny_dir), directory)
    assert "died with exit status -9" in str(failure.value)
    return directory


@pytest.fixture(scope="module")
def copy(died_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the killed run before it is resumed: a resumed run keeps only the optimizer state of its last epoch."""
    return shutil.copytree(died_in, tmp_path_factory.mktemp("copy") / "died")


@pytest.fixture(scope="module")
def ranks(tiny_dir: Path, died_in: Path, copy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(_resume_all, 2, shallow_assets(tiny_dir), died_in, tmp_path_factory.mktemp("whole"))


def test_a_run_that_is_killed_and_one_that_a_signal_ends_resume_like_the_uninterrupted_one(
    ranks: list[dict[str, Any]],
) -> None:
    """Every figure and bit is equal, with growth by a schedule that measures, and with samples left over."""
    whole, (after_kill, after_signal) = ranks[0]["whole"], ranks[0]["resumed"]
    assert len({step[FIGURES.index("batch_size")] for step in whole}) > 1
    assert [len(after_kill), len(after_signal)] == [1, 3]
    assert after_kill + after_signal == whole[-4:]
    assert all(rank["parameters equal"] for rank in ranks)


def test_a_signal_to_one_rank_saves_the_step_within_its_epoch(ranks: list[dict[str, Any]]) -> None:
    assert [rank["status"] for rank in ranks] == [75, 75]
    assert ranks[0]["saved"] == ["epoch_0", "epoch_1", "recipe_state", f"step_{STOPPED_AFTER}"]
    reasons = ranks[0]["reasons"]
    assert "growth, resumed at epoch 2, step 1" in reasons
    assert not any("changes" in reason for reason in reasons)


def _resume_each_other(rank: int, tiny_dir: Path, by_ours: Path, by_stock: Path) -> tuple[list[bool], list[Any]]:
    """Whether both recipes load the same from a checkpoint of each, and how they then go on from the stock recipe's."""
    ours, stock = adaptive_recipe("full"), stock_recipe("full")
    finished(stock, tiny_config("full", tiny_dir, by_stock, **PLAIN))

    def opened(directory: Path) -> list[Any]:
        keys = {"resume_from_checkpoint": True, "checkpointer__checkpoint_files": ["epoch_1/model-00001-of-00001.bin"]}
        return [
            set_up(stock, tiny_config("full", tiny_dir, directory, **PLAIN | keys)),
            set_up(ours, resuming_config("full", tiny_dir, directory, **PLAIN)),
        ]

    pairs = [opened(by_ours), opened(by_stock)]
    equal = [same_bits(*(local_parameters(recipe._model) for recipe in pair)) for pair in pairs]
    return equal, [[(step["step"], step["lr"], step["loss"]) for step in trained(recipe)[0]] for recipe in pairs[1]]


@pytest.mark.exhaustive
def test_stock_and_adaptive_recipes_open_each_others_checkpoints(tiny_dir: Path, copy: Path, tmp_path: Path) -> None:
    found = run_on_ranks(_resume_each_other, 2, shallow_assets(tiny_dir), copy, tmp_path)
    assert [equal for equal, _ in found] == [[True, True]] * 2
    after_stock, after_ours = found[0][1]
    assert [step for step, *_ in after_stock] == [5, 6]
    assert after_ours == after_stock


def _resume_alone(rank: int, tiny_dir: Path, died_in: Path) -> tuple[list[str], list[dict[str, float]]]:
    steps, _, recipe = finished(
        adaptive_recipe("full"), resuming_config("full", tiny_dir, died_in, checkpoint="epoch_2", **RUN)
    )
    return [entry["reason"] for entry in recipe.trainer.run_log.history], steps


@pytest.mark.exhaustive
def test_another_number_of_ranks_is_noticed_and_the_rate_goes_with_the_batch(
    ranks: list[dict[str, Any]], tiny_dir: Path, died_in: Path, tmp_path: Path
) -> None:
    """A single rank has half the samples per step, as the config was written for, so its rate is the config's."""
    again = shutil.copytree(died_in, tmp_path / "died")
    ((reasons, steps),) = run_on_ranks(_resume_alone, 1, shallow_assets(tiny_dir), again)
    assert reasons[-2] == "resumed with changes: ranks 2 -> 1; samples per optimizer step 16 -> 8"
    assert {step["global_batch_size"] for step in steps} == {8}
    # after half of the last epoch, which is its first step on two ranks and its second on one
    (together,) = (step[FIGURES.index("lr")] for step in ranks[0]["whole"] if step[0] == 9)
    assert len(steps) == 4
    assert steps[1]["lr"] == pytest.approx(together / 2**0.5, rel=1e-9)
    assert steps[-1]["lr"] == pytest.approx(0, abs=1e-12)


def _refusals(rank: int, tiny_dir: Path, output_dir: Path) -> list[str]:
    """Why a run is refused with another base, with a damaged checkpoint, and where another run writes its log."""
    recipe, options = adaptive_recipe("lora"), PLAIN | {"epochs": 1, "adaptive__save_every_n_steps": 1}
    finished(recipe, tiny_config("lora", tiny_dir, output_dir, **options))
    options["resume_from_checkpoint"] = str(output_dir / "step_1")

    def refusal(folder: Path = output_dir, **keys: Any) -> str:
        with pytest.raises(InputError) as refused:
            set_up(recipe, tiny_config("lora", tiny_dir, folder, **options | keys))
        return str(refused.value)

    (other := output_dir / "other").mkdir()
    torch.save({name: value + 0.01 for name, value in torch.load(tiny_dir / MODEL_NAME).items()}, other / MODEL_NAME)
    said = [refusal(checkpointer__checkpoint_dir=str(other))]
    (used := output_dir / "used").mkdir()
    with (used / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said.append(refusal(used, checkpointer__output_dir=str(output_dir)))
    file = output_dir / "step_1" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    return [*said, refusal()]


def test_a_run_never_continues_on_another_base_or_damaged_files_nor_writes_where_another_run_does(
    tiny_dir: Path, tmp_path: Path
) -> None:
    assets = shallow_assets(tiny_dir)
    (said,) = run_on_ranks(_refusals, 1, assets, tmp_path)
    assert said == [
        f"`checkpointer` must have the weights that '{tmp_path}/step_1' was trained on, but has"
        f" '{tmp_path}/other/{MODEL_NAME}' instead of '{assets}/{MODEL_NAME}'.",
        f"`output_dir` is in use: another process writes to '{tmp_path}/used'.",
        f"{tmp_path}/step_1/__0_0.distcp must be as the run wrote it, but its content has changed.",
    ]


def _saved_in_background(rank: int, kind: str, tiny_dir: Path, output_dir: Path) -> tuple[list[Any], bool]:
    """The last epoch of a run with `enable_async_checkpointing`, uninterrupted and resumed."""
    options: dict[str, Any] = PLAIN | {"enable_async_checkpointing": True, "lr_scheduler__num_warmup_steps": 2}
    recipe, checkpoint = adaptive_recipe(kind), "epoch_1"
    steps, parameters, done = finished(recipe, tiny_config(kind, tiny_dir, output_dir, **options))
    if kind == "full":
        done._checkpoint_client._dcp_checkpointer._checkpoint_future.result()
        shutil.rmtree(output_dir / "epoch_2")
        checkpoint = None
    cfg = resuming_config(kind, tiny_dir, output_dir, checkpoint=checkpoint, **options)
    resumed, resumed_parameters, _ = finished(recipe, cfg)
    figures = [[(step["step"], step["lr"], step["loss"]) for step in some] for some in (steps[4:], resumed)]
    return figures, same_bits(parameters, resumed_parameters)


@pytest.mark.parametrize("kind", ["full", pytest.param("full_single", marks=pytest.mark.exhaustive)])
def test_a_run_that_torchtune_saves_in_the_background_resumes_like_the_uninterrupted_one(
    kind: str, tiny_dir: Path, tmp_path: Path
) -> None:
    """The single-device recipe takes the key, but saves as without it."""
    (((whole, resumed), parameters_equal),) = run_on_ranks(
        _saved_in_background, 1, kind, shallow_assets(tiny_dir), tmp_path
    )
    assert [step for step, *_ in whole] == [5, 6]
    assert resumed == whole
    assert parameters_equal


def _with_few_bits(component: str) -> dict[str, Any]:
    inductor.force_disable_caches = True  # torch would reuse code compiled for one of these optimizers for another
    adaptive = {"save_every_n_steps": 1, "oom_recovery": False}
    options = SHALLOW | {"epochs": 2, "max_steps_per_epoch": 2, "optimizer": {"_component_": component, "lr": 1e-3}}
    return options | {"batch_size": 2, "tokenizer__max_seq_len": 64, "adaptive": adaptive}


def _low_bits(rank: int, tiny_dir: Path, output_dir: Path, component: str) -> dict[str, Any]:
    """Whether each checkpoint of a run resumes bit for bit as the run continued."""
    options, recipe = _with_few_bits(component), adaptive_recipe("full")
    steps, parameters, _ = finished(recipe, tiny_config("full", tiny_dir, output_dir, **options))
    found = {}
    places = {"step_3": 3, "step_1": 1, "epoch_0": 2}
    for name, done in places.items():
        if not (output_dir / name).exists():
            continue  # some versions of torch cannot gather this state for torchtune's checkpoint of an epoch
        cfg = tiny_config("full", tiny_dir, output_dir, resume_from_checkpoint=str(output_dir / name), **options)
        resumed, resumed_parameters, _ = finished(recipe, cfg)
        losses = [[step["loss"] for step in some] for some in (steps[done:], resumed)]
        found[name] = losses[0] == losses[1] and same_bits(parameters, resumed_parameters)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizers_of_few_bits_resume_bit_for_bit(name: str, tiny_dir: Path, tmp_path: Path) -> None:
    for found in run_on_ranks(_low_bits, 2, shallow_assets(tiny_dir), tmp_path, f"torchao.optim.{name}"):
        assert found.pop("epoch_0", True)
        assert found == {"step_3": True, "step_1": True}
    assert (tmp_path / "epoch_1").is_dir()

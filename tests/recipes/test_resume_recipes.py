"""A killed run resumes from its last checkpoint as if it had never stopped; changes of its conditions are logged."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from tests.support.ranks import RanksFailedError, run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    adaptive_recipe,
    finished,
    local_parameters,
    resuming_config,
    same_bits,
    set_up,
    shallow_assets,
    stock_recipe,
    stock_resuming_config,
    tiny_config,
    trained,
)
from torchtune_adaptive.errors import InputError, RunEnded

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
    "adaptive": {"memory_limit": "96MiB", "growth_limit": 4, "lr_scaling": "sqrt", "max_batch_size": 3},
}
PLAIN: dict[str, Any] = SHALLOW | {
    "epochs": 3,
    "max_steps_per_epoch": 2,
    "batch_size": 2,
    "tokenizer__max_seq_len": 64,
    "adaptive__oom_recovery": False,
}
# Fields of the state that is saved with a checkpoint. Later versions must read them to resume the run.
STATE_FILE_FIELDS = {"format", "serial", "of_step", "files", "state", "sha256"}
STATE_FIELDS = {
    "run",
    "backoff",
    "epochs_run",
    "epoch_samples",
    "schedule_steps",
    "batch_size",
    "is_global",
    "reference_samples",
    "samples_per_step",
    "smallest_failed_size",
    "tries_failed_size",
    "global_step",
    "micro_batch",
    "micro_batch_limit",
    "micro_batch_unit",
    "left_over",
    "padding",
    "dataset_samples",
    "ranks",
    "memory_limit_bytes",
    "optimizer",
    "config",
    "schedule",
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


def _resume_all(rank: int, tiny_dir: Path, died_in: Path, copy: Path, output_dir: Path) -> dict[str, Any]:
    """A whole run, and resumes of the killed run, also with other data and memory."""
    ours = adaptive_recipe("full")
    whole, whole_parameters, _ = finished(ours, tiny_config("full", tiny_dir, output_dir, **RUN))
    changed = RUN | {"dataset__split": "train[:34]", "epochs": 3}
    changed["adaptive"] = changed["adaptive"] | {"memory_limit": "128MiB"}
    changed_steps, _, changed_recipe = finished(ours, resuming_config("full", tiny_dir, copy, **changed))
    other: dict[str, Any] = RUN | {
        "batch_increase_function": {"_component_": "tests.support.growth_functions.Stubborn"}
    }
    with pytest.raises(InputError) as refusal:
        set_up(ours, resuming_config("full", tiny_dir, died_in, **other))
    resumed, parameters, _ = finished(ours, resuming_config("full", tiny_dir, died_in, **RUN))
    return {
        "whole": [[step[name] for name in FIGURES] for step in whole],
        "resumed": [[step[name] for name in FIGURES] for step in resumed],
        "parameters equal": same_bits(whole_parameters, parameters),
        "stopped": _stopped(rank, tiny_dir, output_dir / "stopped", whole_parameters),
        "changed": (changed_recipe.trainer.run_log.history, [step["global_batch_size"] for step in changed_steps]),
        "refusal": str(refusal.value),
    }


def _stopped(rank: int, tiny_dir: Path, output_dir: Path, whole_parameters: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A run that a signal to the second rank ends within an epoch, and that is resumed from there."""

    class Stopped(adaptive_recipe("full")):
        def before_step(self, step: int) -> None:
            if (rank, step) == (1, STOPPED_AFTER - 1):
                signal.raise_signal(signal.SIGTERM)

        def train(self) -> None:
            with self.listening():
                super().train()

    recipe = set_up(Stopped, tiny_config("full", tiny_dir, output_dir, **RUN))
    with pytest.raises(RunEnded) as end:
        recipe.train()
    saved = sorted(path.name for path in output_dir.iterdir() if path.is_dir())
    steps, parameters, resumed = finished(adaptive_recipe("full"), resuming_config("full", tiny_dir, output_dir, **RUN))
    return {
        "status": end.value.status,
        "saved": saved,
        "resumed": [[step[name] for name in FIGURES] for step in steps],
        "parameters equal": same_bits(whole_parameters, parameters),
        "reasons": [entry["reason"] for entry in resumed.trainer.run_log.history],
    }


@pytest.fixture(scope="module")
def died_in(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("died")
    with pytest.raises(RanksFailedError) as failure:
        run_on_ranks(_die, 2, shallow_assets(tiny_dir), directory)
    assert "died with exit status -9" in str(failure.value)
    return directory


@pytest.fixture(scope="module")
def copies(died_in: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the killed run before it is resumed: a resumed run keeps only the optimizer state of its last epoch."""
    directory = tmp_path_factory.mktemp("copies")
    return {name: shutil.copytree(died_in, directory / name) for name in ("changed", "opened")}


@pytest.fixture(scope="module")
def ranks(
    tiny_dir: Path, died_in: Path, copies: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    arguments = shallow_assets(tiny_dir), died_in, copies["changed"], tmp_path_factory.mktemp("whole")
    return run_on_ranks(_resume_all, 2, *arguments)


def test_a_killed_run_resumes_like_the_uninterrupted_one(ranks: list[dict[str, Any]]) -> None:
    """Every figure and bit is equal, with growth by a schedule that measures, and with samples left over."""
    whole, resumed = ranks[0]["whole"], ranks[0]["resumed"]
    assert len({step[FIGURES.index("batch_size")] for step in whole}) > 1
    assert len(resumed) == 4
    assert resumed == whole[-4:]
    assert all(rank["parameters equal"] for rank in ranks)


def test_the_state_of_a_checkpoint_has_the_fields_of_every_version_so_far(
    ranks: list[dict[str, Any]], died_in: Path
) -> None:
    contents = [json.loads((died_in / f"epoch_{epoch}" / "adaptive_state.json").read_text()) for epoch in range(4)]
    assert [content.keys() for content in contents] == [STATE_FILE_FIELDS] * 4
    assert [content["serial"] for content in contents] == [1, 2, 3, 4]  # two by the run that died
    assert all(content["state"].keys() == STATE_FIELDS for content in contents)
    assert len({content["state"]["run"]["id"] for content in contents}) == 1
    assert contents[1]["state"]["global_step"] == ranks[0]["resumed"][0][0] - 1
    assert [content["state"]["epochs_run"] for content in contents] == [1, 2, 3, 4]


def test_a_run_that_a_signal_ends_resumes_within_its_epoch_like_the_uninterrupted_one(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["stopped"]["status"] for rank in ranks] == [75, 75]
    assert ranks[0]["stopped"]["saved"] == ["epoch_0", "epoch_1", "recipe_state", f"step_{STOPPED_AFTER}"]
    assert ranks[0]["stopped"]["resumed"] == ranks[0]["whole"][STOPPED_AFTER:]
    assert all(rank["stopped"]["parameters equal"] for rank in ranks)
    reasons = ranks[0]["stopped"]["reasons"]
    assert "growth, resumed at epoch 2, step 1" in reasons
    assert not any("changes" in reason for reason in reasons)


def test_the_rate_is_that_of_its_place_scaled_by_the_root_of_the_batch(ranks: list[dict[str, Any]]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    rate: Any = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=16).lr_lambdas[0]
    names = dict(zip(FIGURES, zip(*ranks[0]["whole"], strict=True), strict=True))
    epochs_done, expected = 0.0, []
    for samples in names["global_batch_size"]:
        epochs_done += samples / 32  # of 36, in whole steps of 8 or 16
        expected.append(1e-3 * rate(4 * epochs_done) * (samples / 8) ** 0.5)
    assert names["lr"] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_other_data_and_another_limit_are_noticed_and_the_batch_stays(ranks: list[dict[str, Any]]) -> None:
    history, sizes = ranks[0]["changed"]
    assert history[-2]["reason"] == (
        "resumed with changes: samples in the data set 36 -> 34; bytes of memory per rank 100663296 -> 134217728;"
        " adaptive.memory_limit '96MiB' -> '128MiB'; dataset.split 'train[:36]' -> 'train[:34]'; epochs 4 -> 3"
    )
    assert history[-1]["reason"] == "growth, resumed at epoch 2"
    assert sizes == [16] * 2  # 17 samples a rank


def test_a_schedule_that_does_not_accept_the_state_of_another_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "must accept the state of the resumed run, but does not accept {'measure" in rank["refusal"]
        assert rank["refusal"].endswith(": KeyError: 'seen'.")


def _resume_each_other(rank: int, tiny_dir: Path, by_ours: Path, by_stock: Path) -> tuple[list[bool], list[Any]]:
    """Whether both recipes load the same from a checkpoint of each, and how they then go on from the stock recipe's."""
    ours, stock = adaptive_recipe("full"), stock_recipe("full")
    finished(stock, tiny_config("full", tiny_dir, by_stock, **PLAIN))

    def opened(directory: Path) -> list[Any]:
        return [
            set_up(stock, stock_resuming_config("full", tiny_dir, directory, epochs_run=2, **PLAIN)),
            set_up(ours, resuming_config("full", tiny_dir, directory, **PLAIN)),
        ]

    pairs = [opened(by_ours), opened(by_stock)]
    equal = [same_bits(*(local_parameters(recipe._model) for recipe in pair)) for pair in pairs]
    return equal, [[(step["step"], step["lr"], step["loss"]) for step in trained(recipe)[0]] for recipe in pairs[1]]


@pytest.mark.exhaustive
def test_stock_and_adaptive_recipes_open_each_others_checkpoints(
    tiny_dir: Path, copies: dict[str, Path], tmp_path: Path
) -> None:
    found = run_on_ranks(_resume_each_other, 2, shallow_assets(tiny_dir), copies["opened"], tmp_path)
    assert [equal for equal, _ in found] == [[True, True]] * 2
    after_stock, after_ours = found[0][1]
    assert [step for step, *_ in after_stock] == [5, 6]
    assert after_ours == after_stock


def _resume_alone(rank: int, tiny_dir: Path, died_in: Path) -> tuple[list[str], list[dict[str, float]]]:
    steps, _, recipe = finished(
        adaptive_recipe("full"), resuming_config("full", tiny_dir, died_in, checkpoint="epoch_2", **RUN)
    )
    return [entry["reason"] for entry in recipe.trainer.run_log.history], steps


def test_another_number_of_ranks_is_noticed_and_the_rate_goes_with_the_batch(
    ranks: list[dict[str, Any]], tiny_dir: Path, died_in: Path, tmp_path: Path
) -> None:
    """A single rank has half the samples per step, as the config was written for, so its rate is the config's."""
    copy = shutil.copytree(died_in, tmp_path / "died")
    ((reasons, steps),) = run_on_ranks(_resume_alone, 1, shallow_assets(tiny_dir), copy)
    assert reasons[-2] == "resumed with changes: ranks 2 -> 1; samples per optimizer step 16 -> 8"
    assert {step["global_batch_size"] for step in steps} == {8}
    # after half of the last epoch, which is its first step on two ranks and its second on one
    (together,) = (step[FIGURES.index("lr")] for step in ranks[0]["whole"] if step[0] == 9)
    assert len(steps) == 4
    assert steps[1]["lr"] == pytest.approx(together / 2**0.5, rel=1e-9)
    assert steps[-1]["lr"] == pytest.approx(0, abs=1e-12)


def _with_new_values(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    """The rates and weight decays of a run resumed with changes from a step and an epoch; a refusal."""
    recipe = adaptive_recipe("full")
    options: dict[str, Any] = PLAIN | {"epochs": 2, "lr_scheduler": None, "adaptive": {"save_every_n_steps": 2}}
    finished(recipe, tiny_config("full", tiny_dir, output_dir, **options))
    changed = options | {"optimizer__lr": 0.5, "optimizer__weight_decay": 0.25, "max_steps_per_epoch": 3}
    found = {}
    for name in ("step_2", "epoch_0"):
        copy = output_dir.with_name(name)
        shutil.copytree(output_dir, copy)
        steps, _, resumed = finished(recipe, resuming_config("full", tiny_dir, copy, checkpoint=name, **changed))
        decay = resumed._optimizer.param_groups[0]["weight_decay"]
        found[name] = ([(step["step"], step["lr"]) for step in steps], decay)
    with pytest.raises(InputError) as refused:
        set_up(recipe, resuming_config("full", tiny_dir, output_dir, checkpoint="step_4", **options | {"epochs": 1}))
    return found | {"fewer epochs": str(refused.value)}


def test_a_resumed_run_has_new_values_also_from_an_epoch_and_too_few_epochs_are_refused(
    tiny_dir: Path, tmp_path: Path
) -> None:
    (found,) = run_on_ranks(_with_new_values, 1, shallow_assets(tiny_dir), tmp_path / "run")
    assert found["step_2"] == ([(step, 0.5) for step in range(3, 7)], 0.25)
    assert found["epoch_0"] == ([(step, 0.5) for step in range(3, 6)], 0.25)
    assert found["fewer epochs"].startswith("`epochs` must be at least 2 to resume from ")


def _saved_in_background(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, Any]:
    """The last epochs of a run with `enable_async_checkpointing`, uninterrupted and resumed."""
    options: dict[str, Any] = PLAIN | {"enable_async_checkpointing": True, "lr_scheduler__num_warmup_steps": 2}
    found = {}
    for kind in ("full", "full_single"):
        recipe, path = adaptive_recipe(kind), output_dir / kind
        steps, parameters, done = finished(recipe, tiny_config(kind, tiny_dir, path, **options))
        if kind == "full":
            done._checkpoint_client._dcp_checkpointer._checkpoint_future.result()
            shutil.rmtree(path / "epoch_2")
        checkpoint = None if kind == "full" else "epoch_1"
        cfg = resuming_config(kind, tiny_dir, path, checkpoint=checkpoint, **options)
        resumed, resumed_parameters, _ = finished(recipe, cfg)
        names = ("step", "lr", "loss")
        figures = [[[step[name] for name in names] for step in some] for some in (steps[4:], resumed)]
        found[kind] = (figures, same_bits(parameters, resumed_parameters))
    return found


def test_a_run_that_torchtune_saves_in_the_background_resumes_like_the_uninterrupted_one(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """The single-device recipe takes the key, but saves as without it."""
    (found,) = run_on_ranks(_saved_in_background, 1, shallow_assets(tiny_dir), tmp_path)
    for (whole, resumed), parameters_equal in found.values():
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


def _saved_by_stock(rank: int, tiny_dir: Path, output_dir: Path, component: str) -> None:
    cfg = tiny_config("full", tiny_dir, output_dir, **_with_few_bits(component))
    with pytest.raises(NotImplementedError):
        finished(stock_recipe("full"), cfg)


@pytest.mark.exhaustive
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page says it of torch 2.13")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchtunes_run_ends_where_the_state_of_such_an_optimizer_cannot_be_gathered(
    name: str, tiny_dir: Path, tmp_path: Path
) -> None:
    run_on_ranks(_saved_by_stock, 2, shallow_assets(tiny_dir), tmp_path, f"torchao.optim.{name}")
    assert not list(tmp_path.glob("epoch_*"))

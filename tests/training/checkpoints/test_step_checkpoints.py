"""All that training changes is saved after a step and loaded bit for bit, also on another number of ranks."""

import os
import random
import re
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from tests.support.faults import WIDTH, ShardedTrainee, same_bits
from tests.support.full_disk import FullDisk, full_in_each_call
from tests.support.ranks import run_on_ranks
from tests.support.toys import STATE
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import CheckpointError, InputError
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.checkpoints.digests import first_change
from torchtune_adaptive.training.checkpoints.folder import (
    RANK_STATES_NAME,
    Checkpoint,
    CheckpointFolder,
    read_checkpoint,
    write_state,
)
from torchtune_adaptive.training.checkpoints.reading import TensorReader
from torchtune_adaptive.training.checkpoints.steps import StepCheckpoints
from torchtune_adaptive.training.checkpoints.tensors import TrainedTensors
from torchtune_adaptive.training.folder_lock import FolderReplacedError

ADAMW = {"optimizer._component_": "torch.optim.AdamW", "optimizer.lr": 0.01}


def steps_of(
    folder: CheckpointFolder,
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    every_steps: int | None = None,
    keep_last: int | None = None,
    in_background: bool = False,
) -> StepCheckpoints:
    settings = AdaptiveSettings(
        save_every_n_steps=every_steps, keep_last_n_checkpoints=keep_last, save_in_background=in_background
    )
    return StepCheckpoints(folder, model, optimizers, settings, Consensus())


class Run:
    """A run in this process alone."""

    def __init__(self, path: Path, *, optimizer: Any = torch.optim.AdamW, **options: Any) -> None:
        path.mkdir(exist_ok=True)
        torch.manual_seed(0)
        self.folder = CheckpointFolder(path)
        self.folder.checkpoints()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
        self.optimizer: torch.optim.Optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.steps = steps_of(self.folder, self.model, self.optimizer, **options)

    def train(self, steps: int) -> None:
        for step in range(steps):
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, step: int, *, at_once: bool = False, config: dict[str, Any] = ADAMW) -> bool:
        state = replace(STATE, global_step=step, optimizer=self.steps.options(), config=config)
        return self.steps.save(state, at_once=at_once)

    def load(self, *, config: dict[str, Any] = ADAMW) -> Any:
        return self.steps.load(self.folder.checkpoints()[-1], config=config)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of parameters and optimizer state."""
        named = TrainedTensors(self.model, [self.optimizer], rank=0, ranks=1).tensors()
        return {name: tensor.clone() for name, tensor in named.items()}

    def names(self) -> list[str]:
        return [one.path.name for one in CheckpointFolder(self.folder.path).checkpoints()]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of this package, without those of torch."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("torchtune")]


# ---- saved and loaded


def test_a_loaded_checkpoint_has_the_saved_bits_and_trains_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.train(3)
    assert run.save(3)
    at_three = run.tensors()
    run.train(2)
    resumed = Run(tmp_path)
    resumed.train(1)  # loading replaces this state
    state = resumed.load()
    assert said(caplog) == [f"Checkpoint saved to {tmp_path}/step_3", f"Resuming from {tmp_path}/step_3"]
    assert state == replace(STATE, global_step=3, optimizer=state.optimizer, config=ADAMW)
    assert same_bits(resumed.tensors(), at_three)
    resumed.train(2)
    assert same_bits(resumed.tensors(), run.tensors())


def test_torch_computes_no_checksums_of_what_has_digests_and_then_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, save, seen = torch.serialization.get_crc32_options(), torch.save, []

    def watched(*args: Any, **options: Any) -> None:
        seen.append(torch.serialization.get_crc32_options())
        save(*args, **options)

    monkeypatch.setattr(torch, "save", watched)
    run = Run(tmp_path)
    assert run.save(1)
    assert seen[:4] == [False] * 4  # each tensor
    assert seen[-1] is torch.serialization.get_crc32_options() is before  # the states of the ranks


def test_tensors_of_an_epochs_checkpoint_are_left_to_torchtune_and_its_state_is_taken(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = run.tensors()
    assert run.steps.load(None, config=ADAMW) is None
    epoch = Checkpoint(tmp_path / "epoch_1", 1, STATE, 2, tmp_path / "epoch_1" / "recipe_state.pt")
    write_state(epoch.path, STATE)
    loaded: Any = run.steps.load(epoch, config={})
    assert (loaded, loaded.rank_states) == (STATE, STATE.rank_states)
    assert run.steps.load(replace(epoch, state=None), config={}) is None
    assert same_bits(run.tensors(), before)


@pytest.mark.parametrize(
    ("every_steps", "steps", "expected"),
    [(3, 1, [3, 6, 9]), (3, 2, [4, 6, 10]), (None, 1, [])],
    ids=["each step", "of two steps at once", "none"],
)
def test_the_steps_that_are_saved(tmp_path: Path, every_steps: int | None, steps: int, expected: list[int]) -> None:
    run = Run(tmp_path, every_steps=every_steps)
    for step in range(steps, 11, steps):
        run.steps.after_steps(step, steps=steps, stop=False, state=lambda step=step: replace(STATE, global_step=step))
    assert sorted(int(path.name.removeprefix("step_")) for path in tmp_path.glob("step_*")) == expected


# ---- options of the optimizer


@pytest.mark.parametrize("is_of_step", [True, False], ids=["of a step", "of an epoch"])
def test_options_of_the_optimizer_are_those_of_the_checkpoint_unless_the_config_has_changed_them(
    is_of_step: bool, tmp_path: Path
) -> None:
    """torchtune itself has loaded those of an epoch."""
    config = ADAMW | {"optimizer.betas.0": 0.9, "optimizer.betas.1": 0.95}
    changed = config | {"optimizer.lr": 0.02, "optimizer.betas.1": 0.99, "batch_size": 7}
    saved: dict[str, Any] = {"lr": 0.5, "initial_lr": 1.0, "weight_decay": 0.25, "betas": (0.9, 0.95)}
    from_config = {"lr": 0.01, "initial_lr": 0.01, "betas": (0.9, 0.99)}
    run = Run(tmp_path)
    run.optimizer.param_groups[0].update(saved)
    run.save(1, config=config)
    checkpoint = replace(run.folder.checkpoints()[0], is_of_step=is_of_step)
    for new, expected in ((config, saved), (changed, saved | from_config)):
        resumed = Run(tmp_path, optimizer=partial(torch.optim.AdamW, betas=(0.9, 0.99)))
        group = resumed.optimizer.param_groups[0]
        group.update(from_config if is_of_step else saved)
        resumed.steps.load(checkpoint, config=new)
        assert {key: group[key] for key in saved} == expected


# ---- in the background


def test_in_the_background_the_state_of_the_step_is_written_while_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writes, may_write, write = threading.Event(), threading.Event(), FileSystemWriter.write_data

    def wait_and_write(*args: Any, **options: Any) -> Any:
        writes.set()
        assert may_write.wait(timeout=60)
        return write(*args, **options)

    monkeypatch.setattr(FileSystemWriter, "write_data", wait_and_write)
    run = Run(tmp_path, in_background=True)
    run.train(2)
    at_two = run.tensors()
    assert run.save(2)
    assert writes.wait(timeout=60)
    run.train(3)
    assert (run.names(), said(caplog)) == ([], [])
    may_write.set()
    run.steps.wait()
    assert said(caplog) == [f"Checkpoint saved to {tmp_path}/step_2"]
    assert run.names() == ["step_2"]
    run.steps.wait()  # there is nothing to wait for
    resumed = Run(tmp_path)
    resumed.load()
    assert same_bits(resumed.tensors(), at_two)


def test_a_checkpoint_waits_for_the_one_before_it_and_at_once_is_not_in_the_background(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, in_background=True, keep_last=1)
    assert run.save(1)
    assert run.save(2)
    assert said(caplog) == [f"Checkpoint saved to {tmp_path}/step_1"]
    assert run.save(3, at_once=True)
    assert said(caplog) == [f"Checkpoint saved to {tmp_path}/step_{step}" for step in (1, 2, 3)]
    assert run.names() == ["step_3"]


# ---- what cannot be written


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**20))


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize(
    ("owner", "name", "in_background"),
    [
        (os, "fsync", False),
        (os, "fsync", True),
        (Path, "mkdir", False),
        (FileSystemWriter, "write_data", True),
    ],
    ids=["fsync", "fsync in the background", "mkdir", "write_data in the background"],
)
def test_a_checkpoint_that_cannot_be_written_is_logged_and_earlier_ones_are_kept(
    owner: Any, name: str, in_background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, disk in enumerate(full_in_each_call(owner, name)):
        run = Run(tmp_path / str(number), optimizer=torch.optim.SGD, every_steps=1, in_background=in_background)
        run.train(1)
        run.save(1)
        run.steps.wait()
        run.train(1)
        with disk:
            saved = run.save(2)
            run.steps.wait()
        failed = (
            "Checkpoint step_2 could not be saved: OSError: [Errno 28] No space left on device (3.0 MiB free in"
            f" {run.folder.path}). Earlier checkpoints are kept; training continues and saves again at the next"
            " checkpoint."
        )
        assert (failed in said(caplog)) == disk.has_struck
        assert in_background or saved != disk.has_struck
        assert run.names() in [["step_1", "step_2"], *([["step_1"]] if disk.has_struck else [])]
        Run(run.folder.path, optimizer=torch.optim.SGD).load()
        assert run.save(3)
        run.steps.wait()
        assert run.names()[-1] == "step_3"
        assert not list(run.folder.path.glob("unfinished_*"))
        caplog.clear()


@pytest.mark.usefixtures("little_room")
def test_state_that_cannot_be_saved_is_logged_and_where_a_signal_ends_the_run_training_does_not_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.optimizer.state[next(run.model.parameters())]["moments"] = [1]
    assert not run.save(1)
    with pytest.raises(CheckpointError, match="ended the run after step 5, but saving a checkpoint failed"):
        run.steps.after_steps(5, stop=True, state=lambda: replace(STATE, global_step=5))
    assert said(caplog) == [
        f"Checkpoint step_{step} could not be saved: the optimizer's moments is a list, neither a plain tensor nor a"
        f" number (3.0 MiB free in {tmp_path}). Earlier checkpoints are kept{continues}."
        for step, continues in ((1, "; training continues"), (5, ""))
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_run_ends_where_its_folder_is_replaced_while_it_writes_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run", every_steps=1, in_background=True)
    run.folder.lock()
    finish = FileSystemWriter.finish

    def finish_and_replace_folder(*args: Any) -> None:
        finish(*args)
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()

    monkeypatch.setattr(FileSystemWriter, "finish", finish_and_replace_folder)
    with pytest.raises(FolderReplacedError, match=r"/run' must stay the folder that this run has locked"):
        _ = run.save(1), run.steps.wait()
    assert list((tmp_path / "run").iterdir()) == []


# ---- what cannot be loaded


def test_another_optimizers_checkpoint_is_refused_also_that_of_an_epoch(tmp_path: Path) -> None:
    """torchtune loads the state of any optimizer; the first step would then fail or be wrong."""
    run = Run(tmp_path)
    run.save(1)
    (saved,) = run.folder.checkpoints()
    epoch = replace(saved, path=tmp_path / "epoch_0")
    shutil.copytree(saved.path, epoch.path)
    assert run.steps.load(epoch, config=ADAMW) == saved.state
    for checkpoint in (saved, epoch):
        with pytest.raises(InputError) as refused:
            run.steps.load(checkpoint, config={"optimizer._component_": "torch.optim.SGD"})
        assert str(refused.value) == (
            "`optimizer._component_` must be torch.optim.AdamW as in the checkpoint, but is torch.optim.SGD instead."
        )


def test_a_checkpoint_of_one_optimizer_for_one_per_parameter_is_refused(tmp_path: Path) -> None:
    """As where only the saved or only the resumed run has `optimizer_in_bwd`."""
    run = Run(tmp_path)
    run.train(1)
    run.save(1)
    other = Run(tmp_path)
    optimizers = [torch.optim.AdamW([parameter], lr=0.01) for parameter in other.model.parameters()]
    other.steps = steps_of(other.folder, other.model, *optimizers)
    with pytest.raises(InputError, match="`optimizer_in_bwd` must be as in the checkpoint"):
        other.load()


@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("__0_0.distcp", "missing"),
        ("__0_0.distcp", "random bytes"),
        (".metadata", "random bytes"),
        (RANK_STATES_NAME, "random bytes"),
    ],
)
def test_a_damaged_file_is_refused_with_the_path_of_its_checkpoint(tmp_path: Path, file: str, how: str) -> None:
    """After the checkpoint was listed. Which file it is, is named where that is known."""
    run = Run(tmp_path)
    run.train(1)
    run.save(1)
    (checkpoint,) = run.folder.checkpoints()
    path = checkpoint.path / file
    size = path.stat().st_size
    path.unlink()
    if how == "random bytes":
        path.write_bytes(random.Random(0).randbytes(size))
    with pytest.raises(InputError) as refused:
        Run(tmp_path).steps.load(checkpoint, config=ADAMW)
    named = path if file == RANK_STATES_NAME else checkpoint.path
    assert re.fullmatch(rf"{named} cannot be read: .*\.", str(refused.value))
    assert "weights_only" not in str(refused.value)  # torch advises to load the file unsafely


# ---- on several ranks


class WithOwnState(torch.optim.SGD):
    """An optimizer with a tensor on each rank that is not sharded with its parameter."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            own = self.state[parameter].setdefault("own", torch.zeros(5 + dist.get_rank()))
            own += 1 + dist.get_rank()
        return super().step(closure)


def tensors_of(trainee: ShardedTrainee, *, whole: bool) -> dict[str, torch.Tensor]:
    """Copies of all saved tensors: of this rank's part, or gathered from the ranks."""
    named = TrainedTensors(trainee.model, [trainee.optimizer], rank=trainee.rank, ranks=dist.get_world_size()).tensors()
    parts = {name: tensor for name, tensor in named.items() if isinstance(tensor, DTensor)}
    gathered = {name: part.full_tensor() if whole else part.to_local() for name, part in parts.items()}
    return {name: gathered.get(name, tensor).clone() for name, tensor in named.items()}


def save_of(steps: StepCheckpoints, step: int) -> bool:
    return steps.save(replace(STATE, global_step=step, optimizer=steps.options(), config=ADAMW))


def _save_on_two(rank: int, path: Path) -> dict[str, Any]:
    folder = CheckpointFolder(path)
    trainee = ShardedTrainee(warm_steps=2)
    steps = steps_of(folder, trainee.model, trainee.optimizer, every_steps=1)
    background = steps_of(folder, trainee.model, trainee.optimizer, every_steps=1, in_background=True)
    saved = {"step 2": save_of(steps, 2)}
    at_two = tensors_of(trainee, whole=True)
    trainee.step(seed=2)
    saved["step 3"] = save_of(background, 3)
    losses = [trainee.step(seed=seed) for seed in (3, 4)]  # while the checkpoint is written
    background.wait()
    with FullDisk(os, "fsync") if rank == 1 else nullcontext():
        saved["step 4"] = save_of(steps, 4)
    listed = [one.path.name for one in folder.checkpoints()] if rank == 0 else []
    files = sorted(one.name for one in path.glob("*step*"))
    again = ShardedTrainee(warm_steps=1)
    (checkpoint,) = Consensus().from_rank_zero([one for one in folder.checkpoints() if one.path.name == "step_3"])
    loading = steps_of(folder, again.model, again.optimizer)
    cannot_read = FullDisk(TensorReader, "read_metadata") if rank == 1 else nullcontext()
    with cannot_read, pytest.raises(InputError) as refused:
        loading.load(checkpoint, config=ADAMW)
    loading.load(checkpoint, config=ADAMW)
    return {
        "refused": str(refused.value),
        "saved": saved,
        "listed": listed,
        "files": files,
        "at two": at_two,
        "losses": (losses, [again.step(seed=seed) for seed in (3, 4)]),
        "same": same_bits(tensors_of(again, whole=True), tensors_of(trainee, whole=True)),
        "changed": [first_change(checkpoint.path, checkpoint.digests, share=rank, shares=2), *checkpoint.digests],
        "own": _keeps_own_state(folder),
    }


def _keeps_own_state(folder: CheckpointFolder) -> bool:
    """Whether state of each rank alone is the same after saving and loading on the same ranks."""
    trainee, again = ShardedTrainee(warm_steps=0), ShardedTrainee(warm_steps=0)
    for one in (trainee, again):
        one.optimizer = WithOwnState(one.model.parameters(), lr=0.1)
    for seed in range(3):
        trainee.step(seed=seed)
    saved = save_of(steps_of(folder, trainee.model, trainee.optimizer), 10)
    (checkpoint,) = Consensus().from_rank_zero([one for one in folder.checkpoints() if one.path.name == "step_10"])
    steps_of(folder, again.model, again.optimizer).load(checkpoint, config=ADAMW)
    return saved and same_bits(tensors_of(trainee, whole=False), tensors_of(again, whole=False))


def _load_on_four(rank: int, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    trainee = ShardedTrainee(warm_steps=1)
    steps = steps_of(CheckpointFolder(checkpoint.path.parent), trainee.model, trainee.optimizer)
    steps.load(checkpoint, config=ADAMW)
    return tensors_of(trainee, whole=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two_ranks(path: Path) -> list[dict[str, Any]]:
    return run_on_ranks(_save_on_two, 2, path)


def test_two_ranks_save_and_load_all_or_nothing(two_ranks: list[dict[str, Any]], path: Path) -> None:
    """At once and in the background; with a disk that is full for one rank, and with state of each rank alone."""
    assert two_ranks[0]["listed"] == two_ranks[0]["files"] == ["step_2", "step_3"]
    for rank in two_ranks:
        assert rank["same"]
        losses, again = rank["losses"]
        assert again == losses
        assert rank["own"]
        assert rank["saved"] == {"step 2": True, "step 3": True, "step 4": False}
        assert rank["refused"] == f"{path}/step_3 cannot be read: OSError: [Errno 28] No space left on device."
        assert rank["changed"] == ["", ".metadata", "__0_0.distcp", "__1_0.distcp", RANK_STATES_NAME]


def test_four_ranks_load_what_two_have_saved(two_ranks: list[dict[str, Any]], path: Path) -> None:
    for loaded in run_on_ranks(_load_on_four, 4, read_checkpoint(path / "step_2")):
        assert same_bits(loaded, two_ranks[0]["at two"])


def test_one_process_without_sharding_loads_what_two_ranks_have_saved(
    two_ranks: list[dict[str, Any]], path: Path
) -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)]
    model = nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    steps_of(CheckpointFolder(path), model, optimizer).load(read_checkpoint(path / "step_2"), config=ADAMW)
    loaded = TrainedTensors(model, [optimizer], rank=0, ranks=1).tensors()
    assert same_bits(loaded, two_ranks[0]["at two"])
    assert optimizer.param_groups[0]["lr"] == 0.01

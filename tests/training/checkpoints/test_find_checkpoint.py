"""Where a run resumes, for each value of ``resume_from_checkpoint`` and each state of its folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.toys import STATE
from torchtune_adaptive.errors import InputError, RunEnded
from torchtune_adaptive.training.checkpoints.folder import RECIPE_STATE_NAME, Checkpoint, CheckpointFolder
from torchtune_adaptive.training.checkpoints.resume import find_checkpoint

EPOCHS = 4


class Run:
    """A run's folder; ``other`` is the checkpoint that another program has left in it."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.folder = CheckpointFolder(path)
        self.other: Checkpoint | None = None
        self.asked: list[Path] = []

    def save(self, name: str, *, epochs_run: int, with_recipe_state: bool = False) -> Path:
        directory = self.folder.start(name)
        if with_recipe_state:
            (directory / RECIPE_STATE_NAME).write_text("moments")
        return self.folder.finish(name, replace(STATE, epochs_run=epochs_run))

    def save_by_another_program(self, *, epochs_run: int) -> None:
        path = self.folder.path / f"epoch_{epochs_run - 1}"
        self.other = Checkpoint(path, 0, None, epochs_run, path / RECIPE_STATE_NAME)

    def find(self, wanted: Any, *, epochs: int = EPOCHS) -> Checkpoint | None:
        def is_last(one: Checkpoint) -> bool:
            return one.epochs_run >= epochs

        return find_checkpoint(wanted, CheckpointFolder(self.folder.path), is_last=is_last, find_other=self._find_other)

    def name_of(self, wanted: Any, *, epochs: int = EPOCHS) -> str | None:
        found = self.find(wanted, epochs=epochs)
        return found and found.path.name

    def refusal(self, wanted: Any) -> str:
        with pytest.raises(InputError) as refused:
            self.find(wanted)
        return str(refused.value)

    def _find_other(self, path: Path) -> Checkpoint | None:
        self.asked.append(path)
        return self.other


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


# ---- a new run


@pytest.mark.parametrize("wanted", [False, None, 0])
def test_a_new_run_starts_at_the_beginning_even_with_checkpoints_of_epochs(run: Run, wanted: Any) -> None:
    assert run.find(wanted) is None
    run.save("epoch_0", epochs_run=1, with_recipe_state=True)
    run.save_by_another_program(epochs_run=2)
    assert run.find(wanted) is None


def test_a_new_run_is_refused_where_it_would_lose_checkpoints_of_steps(run: Run) -> None:
    run.save("step_5", epochs_run=0)
    path = run.save("step_6", epochs_run=0)
    run.save("epoch_0", epochs_run=1)
    assert run.refusal(False) == (
        f"`resume_from_checkpoint` must be True or auto if '{path}' exists, which a new run would overwrite,"
        " but is False instead."
    )


# ---- the latest checkpoint


@pytest.mark.parametrize("wanted", [True, "auto", 1])
def test_a_run_resumes_from_the_checkpoint_that_was_written_last(run: Run, wanted: Any) -> None:
    run.save("step_900", epochs_run=0)
    assert run.name_of(wanted) == "step_900"
    run.save("epoch_0", epochs_run=1, with_recipe_state=True)
    assert run.name_of(wanted) == "epoch_0"
    run.save("step_1100", epochs_run=1)
    assert run.name_of(wanted) == "step_1100"


def test_without_a_checkpoint_auto_starts_a_new_run_and_true_is_refused(run: Run) -> None:
    run.folder.start("step_1")  # never finished
    assert run.find("auto") is None
    assert run.refusal(True) == (
        "`resume_from_checkpoint` must be False or auto if there is no complete checkpoint,"
        f" as in {str(run.folder.path)!r}, but is True instead."
    )


def test_a_torn_checkpoint_is_not_the_latest(run: Run) -> None:
    run.save("step_5", epochs_run=0)
    path = run.save("epoch_0", epochs_run=1, with_recipe_state=True)
    (path / RECIPE_STATE_NAME).write_text("")
    assert run.name_of(True) == "step_5"


def test_an_epoch_without_optimizer_state_is_skipped_for_the_latest_checkpoint_that_has_it(run: Run) -> None:
    """The last epoch of a run whose number of epochs has been raised."""
    run.save("epoch_2", epochs_run=3, with_recipe_state=True)
    run.save("step_90", epochs_run=3)
    run.save("epoch_3", epochs_run=4)
    assert run.name_of(True, epochs=5) == "step_90"
    (run.folder.path / "step_90" / "adaptive_state.json").unlink()
    assert run.name_of(True, epochs=5) == "epoch_2"


@pytest.mark.parametrize("wanted", [True, "auto"])
def test_a_run_that_has_trained_all_epochs_is_over(run: Run, wanted: Any) -> None:
    run.save("step_90", epochs_run=3)
    path = run.save("epoch_3", epochs_run=4)
    with pytest.raises(RunEnded) as end:
        run.find(wanted)
    assert (str(end.value), end.value.status) == (f"The run is complete: {path} is its last checkpoint.", 0)


def test_a_run_resumes_if_its_last_step_is_saved_but_its_last_epoch_is_not(run: Run) -> None:
    run.save("epoch_2", epochs_run=3, with_recipe_state=True)
    run.save("step_100", epochs_run=3)  # of 100 steps
    assert run.name_of("auto") == "step_100"


# ---- a checkpoint of another program


@pytest.mark.parametrize("wanted", [True, "auto"])
def test_another_programs_checkpoint_is_taken_if_it_has_more_epochs(run: Run, wanted: Any) -> None:
    run.save_by_another_program(epochs_run=1)
    assert run.find(wanted) == run.other
    assert run.asked == [run.folder.path]
    run.save("epoch_0", epochs_run=1, with_recipe_state=True)
    found = run.find(wanted)
    assert found is not None
    assert found.state == replace(STATE, epochs_run=1)  # the adaptive one
    run.save("step_30", epochs_run=1)
    assert run.name_of(wanted) == "step_30"
    run.save_by_another_program(epochs_run=2)
    assert run.find(wanted) == run.other


# ---- a checkpoint by its path


def test_a_checkpoint_may_be_named_by_its_path_whatever_else_there_is(run: Run, tmp_path: Path) -> None:
    for name in ("step_5", "step_6"):
        run.save(name, epochs_run=0)
    run.save("epoch_0", epochs_run=1, with_recipe_state=True)
    assert run.name_of(str(run.folder.path / "step_5")) == "step_5"
    elsewhere = Run(tmp_path / "elsewhere")
    found = elsewhere.find(str(run.folder.path / "epoch_0"))
    assert found is not None
    assert found.path == run.folder.path / "epoch_0"
    assert found.recipe_state == run.folder.path / "epoch_0" / RECIPE_STATE_NAME


def test_a_relative_path_is_of_the_working_directory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save("step_5", epochs_run=0)
    monkeypatch.chdir(run.folder.path.parent)
    assert run.name_of("run/step_5") == "step_5"


def test_the_latest_checkpoint_is_that_of_a_run_resumed_from_a_path(run: Run) -> None:
    for name in ("step_5", "step_6", "step_7"):
        run.save(name, epochs_run=0)
    folder = CheckpointFolder(run.folder.path)
    find_checkpoint(str(folder.path / "step_5"), folder, is_last=lambda one: False, find_other=lambda path: None)
    folder.start("step_8")
    folder.finish("step_8", STATE)
    assert run.name_of(True) == "step_8"


def test_a_checkpoint_without_optimizer_state_cannot_be_resumed(run: Run) -> None:
    path = str(run.save("epoch_3", epochs_run=4))
    assert run.refusal(path) == (
        "`resume_from_checkpoint` must be a checkpoint with optimizer state (not one after the last epoch, nor one"
        f" followed by a later epoch), but is {path!r} instead."
    )


def test_a_torn_checkpoint_that_is_named_is_refused_with_the_reason(run: Run) -> None:
    path = run.save("epoch_0", epochs_run=1, with_recipe_state=True)
    (path / RECIPE_STATE_NAME).write_text("")
    assert run.refusal(str(path)) == (
        f"{path / RECIPE_STATE_NAME} must have 7 bytes for its checkpoint to be complete, but has 0."
    )


def test_a_folder_that_is_not_an_adaptive_checkpoint_is_refused(run: Run) -> None:
    assert run.refusal(str(run.folder.path)).startswith(
        f"{run.folder.path / 'adaptive_state.json'} must be a state file that a run wrote, but reading it failed:"
        " FileNotFoundError: "
    )


@pytest.mark.parametrize("wanted", ["", "no/such", "True", "latest", 2, 0.5, ["step_1"], {"path": "step_1"}])
def test_a_value_without_a_meaning_is_refused(run: Run, wanted: Any) -> None:
    run.save("step_1", epochs_run=0)
    assert run.refusal(wanted) == (
        f"`resume_from_checkpoint` must be True, False, auto or a checkpoint path, but is {wanted!r} instead."
    )

"""What a run needs to go on is read as it was written, whole or not at all, and what is not so is refused."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests import toys
from torchtune_adaptive.batch.noise_scale import gradient_noise_scale
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.run_state import read_state, state_path, write_state

STATE = replace(
    toys.STATE,
    memory_limit_bytes=80 * 2**30,
    schedule={"trace": 0.1, "samples": [1, 2]},
    history=[{"epoch": 0, "batch_size": 4, "reason": "config"}],
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return state_path(tmp_path / "checkpoints")


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Put what ``change`` makes of a state in place of it, in a file that is otherwise as it should be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"2": change(json.loads(json.dumps(asdict(STATE))))}))


# ---- reading what was written


@pytest.mark.parametrize("schedule", [None, {"trace": 0.1}, gradient_noise_scale().state_dict()])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_what_was_written_is_read_as_it_was(path: Path, schedule: Any, micro_batch: int | None) -> None:
    state = replace(STATE, schedule=schedule, micro_batch=micro_batch)
    write_state(path, state)
    assert read_state(path, epochs_run=2) == state


def test_the_state_lies_beside_torchtunes_recipe_state(tmp_path: Path) -> None:
    path = state_path(str(tmp_path))
    write_state(path, STATE)
    assert path == tmp_path / "recipe_state" / "adaptive_state.json"
    assert list(path.parent.iterdir()) == [path]


def test_where_there_is_no_state_of_an_epoch_there_is_none(path: Path) -> None:
    assert read_state(path, epochs_run=2) is None
    write_state(path, STATE)
    assert [read_state(path, epochs_run=epochs) for epochs in (1, 3, 22)] == [None] * 3


def test_states_of_earlier_epochs_are_kept_and_those_of_a_run_that_was_gone_back_on_are_not(path: Path) -> None:
    states = {epochs: replace(STATE, epochs_run=epochs, global_step=epochs) for epochs in (2, 9, 10)}
    for state in states.values():
        write_state(path, state)
    assert [read_state(path, epochs_run=epochs) for epochs in states] == list(states.values())
    again = replace(STATE, epochs_run=9, global_step=999)
    write_state(path, again)
    assert [read_state(path, epochs_run=epochs) for epochs in states] == [states[2], again, None]


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"one": 2}', "\udcff"])
def test_another_programs_file_is_replaced(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode(errors="surrogateescape"))
    write_state(path, STATE)
    assert read_state(path, epochs_run=2) == STATE


# As the version before the trainer with parts wrote it, after two epochs.
EARLIER = """{
  "2": {
    "epochs_run": 2,
    "schedule_steps": 25,
    "batch_size": 8,
    "is_global": false,
    "reference_samples": 16,
    "samples_per_step": 32,
    "global_step": 75,
    "micro_batch": null,
    "micro_batch_unit": "rows",
    "longest_row_tokens": 512,
    "left_over": [
      96,
      100
    ],
    "dataset_samples": 400,
    "ranks": 4,
    "memory_limit_bytes": 85899345920,
    "schedule": {
      "trace": 0.1,
      "samples": [
        1,
        2
      ]
    },
    "history": [
      {
        "epoch": 0,
        "batch_size": 4,
        "reason": "config"
      }
    ]
  }
}
"""


def test_a_file_of_an_earlier_version_is_read_and_written_to_the_same_bytes(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(EARLIER)
    assert read_state(path, epochs_run=2) == STATE
    path.unlink()
    write_state(path, STATE)
    assert path.read_text() == EARLIER


# ---- what cannot be read


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as refused:
        read_state(path, epochs_run=2)
    return str(refused.value)


@pytest.mark.parametrize("length", [0, 1, 40, -3])
def test_a_file_that_ends_too_soon_is_refused_by_its_path(path: Path, length: int) -> None:
    write_state(path, STATE)
    path.write_text(path.read_text()[:length])
    sentence = refusal(path)
    assert sentence.startswith(f"{path} must be as a run wrote it for its checkpoint to be resumed, but failed: ")
    assert sentence.endswith(".")
    assert "\n" not in sentence


@pytest.mark.parametrize("content", [b"not JSON", b"[1, 2, 3]", b"null", b'"2"', b"17", b"\xff\xfe{}"])
def test_a_file_of_another_kind_is_refused_by_its_path(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path} must be ")


def test_a_directory_in_the_files_place_is_refused_by_its_path(path: Path) -> None:
    path.mkdir(parents=True)
    assert refusal(path).startswith(f"{path} must be ")


@pytest.mark.parametrize(
    "change",
    [
        lambda state: None,
        lambda state: [],
        lambda state: "state",
        lambda state: {},
        lambda state: state | {"more": 1},
        lambda state: {name: value for name, value in state.items() if name != "ranks"},
        lambda state: {name: value for name, value in state.items() if name != "left_over"},
        lambda state: state | {"left_over": 96},
        lambda state: state | {"left_over": None},
    ],
    ids=["null", "list", "text", "empty", "a key more", "a key less", "no left_over", "a number", "nothing left over"],
)
def test_a_state_of_other_keys_is_refused_by_its_path(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    rewrite(path, change)
    assert refusal(path).startswith(f"{path} must be ")


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", "8"), ("global_step", None), ("is_global", "no"), ("left_over", [1]), ("history", 3)],
)
def test_a_state_of_other_types_is_refused_by_its_path(path: Path, name: str, value: Any) -> None:
    rewrite(path, lambda state: state | {name: value})
    assert refusal(path).startswith(f"{path} must be ")


# ---- what is not as it was


@pytest.mark.parametrize(
    ("name", "value", "clause"),
    [
        ("ranks", 2, "ranks 4 -> 2"),
        ("dataset_samples", 300, "samples in the data set 400 -> 300"),
        ("memory_limit_bytes", 1024, f"bytes of memory per rank {80 * 2**30} -> 1024"),
        ("samples_per_step", 64, "samples per optimizer step 32 -> 64"),
    ],
)
def test_what_is_not_as_it_was_is_said_in_a_clause_each(name: str, value: int, clause: str) -> None:
    assert STATE.changes(replace(STATE, **{name: value})) == [clause]


def test_all_changes_are_said_and_what_a_run_itself_moves_on_is_none() -> None:
    assert STATE.changes(replace(STATE, ranks=2, samples_per_step=16)) == [
        "ranks 4 -> 2",
        "samples per optimizer step 32 -> 16",
    ]
    assert STATE.changes(replace(STATE, global_step=80, epochs_run=3, history=[], left_over=(0, 0))) == []
    assert STATE.changes(replace(STATE, memory_limit_bytes=None)) == []  # not known

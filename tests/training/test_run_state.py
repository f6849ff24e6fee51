"""A state is the same after JSON, an invalid state is refused, and each change is named in one clause."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.support import toys
from torchtune_adaptive.schedule import gradient_noise_scale
from torchtune_adaptive.training.run_state import AdaptiveState

STATE = replace(toys.STATE, memory_limit_bytes=80 * 2**30, schedule={"trace": 0.1, "samples": [1, 2]})
GLOBAL = "adaptive.global_batch_size"


def through_json(state: AdaptiveState) -> Any:
    return json.loads(json.dumps(asdict(state)))


# ---- reading what was written


def test_a_state_is_the_same_after_json_and_one_of_another_version_is_refused() -> None:
    state = replace(STATE, schedule=gradient_noise_scale().state_dict(), micro_batch=3)
    assert AdaptiveState.from_json(through_json(state)) == state
    with pytest.raises(TypeError, match="more"):
        AdaptiveState.from_json(through_json(state) | {"more": 1})
    content = through_json(state)
    del content["backoff"]
    with pytest.raises(TypeError, match="backoff"):
        AdaptiveState.from_json(content)


# ---- what has changed


@pytest.mark.parametrize(
    ("name", "value", "clause"),
    [
        ("ranks", 2, "ranks 4 -> 2"),
        ("dataset_samples", 300, "samples in the data set 400 -> 300"),
        ("memory_limit_bytes", 1024, f"bytes of memory per rank {80 * 2**30} -> 1024"),
        ("config", {"seed": 1, "optimizer.lr": 0.1, "dtype": "bf16"}, "dtype None -> 'bf16'"),
        ("config", {"seed": 2, "optimizer.lr": 0.1}, "seed 1 -> 2, but random numbers continue as saved"),
    ],
)
def test_each_change_is_named_in_one_clause(name: str, value: Any, clause: str) -> None:
    assert STATE.changes(replace(STATE, **{name: value})) == [clause]


@pytest.mark.parametrize(
    ("key", "is_global", "before", "after", "now", "clause"),
    [
        ("batch_size", False, 4, 2, 8, "batch_size 4 -> 2, but the batch stays 8"),
        ("batch_size", False, 4, 2, 2, "batch_size 4 -> 2"),
        ("batch_size", True, 4, 2, 8, "batch_size 4 -> 2"),
        (GLOBAL, True, 6, 12, 8, f"{GLOBAL} 6 -> 12, but the batch stays 8"),
        (GLOBAL, True, None, 6, 9, f"{GLOBAL} None -> 6"),
    ],
    ids=["kept", "used", "of a micro-batch", "global and kept", "another unit, and has grown"],
)
def test_a_size_in_the_config_that_is_not_used_is_named_with_the_one_that_stays(
    key: str, is_global: bool, before: int | None, after: int, now: int, clause: str
) -> None:
    saved = replace(STATE, is_global=is_global and before is not None, config={key: before})
    resumed = replace(saved, is_global=is_global, batch_size=now, config={key: after})
    assert saved.changes(resumed) == [clause]


def test_all_changes_are_named_but_not_the_progress_of_the_run() -> None:
    config = {"seed": 2, "optimizer.lr": 0.2}
    assert STATE.changes(replace(STATE, ranks=2, samples_per_step=16, config=config)) == [
        "ranks 4 -> 2",
        "samples per optimizer step 32 -> 16",
        "optimizer.lr 0.1 -> 0.2",
        "seed 1 -> 2",
    ]
    moved = replace(STATE, global_step=80, epochs_run=3, epoch_samples=32, left_over=(0, 0), rank_states=[])
    assert STATE.changes(moved) == []
    assert STATE.changes(replace(STATE, memory_limit_bytes=None)) == []  # unknown


def test_output_paths_and_logging_keys_are_not_changes() -> None:
    keys = ("output_dir", "checkpointer.checkpoint_files.0", "metric_logger.log_dir", "log_every_n_steps")
    others = dict.fromkeys((*keys, "profiler.enabled", "resume_from_checkpoint"), "other")
    assert STATE.changes(replace(STATE, config=STATE.config | others)) == []

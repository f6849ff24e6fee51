"""Configs that differ between ranks are refused on all ranks; only places in file systems and the memory limit may."""

import math
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.training.same_config import _agree, check_same_config


@pytest.mark.parametrize(
    ("key", "one", "other", "agree"),
    [
        ("optimizer.lr", 0.1, 0.2, False),
        ("optimizer.lr", math.nan, float("nan"), True),
        ("adaptive.memory_limit", "1GiB", "2GiB", True),
        ("adaptive.margin", "1GiB", "2GiB", False),
        ("tokenizer.path", "/local/a", "/mnt/b", True),
        ("tokenizer.path", "/local/a", None, False),
        ("teacher_checkpointer.checkpoint_dir", "runs/a", "b", True),
        ("dataset.source", "/data/a", "../b", True),
        ("dataset.source", "/data/a", "tatsu-lab/alpaca", False),
        ("dataset.source", "data/a", "data/b", False),  # names in the Hub, for all that is known
        ("dataset.data_files", "/data/a.json", "~/b.json", True),
        ("dataset.data_files", "data/en.json", "data/fr.json", False),
    ],
)
def test_values_agree_if_they_train_the_same(key: str, one: Any, other: Any, agree: bool) -> None:
    assert _agree(key, one, other) is agree


def check(rank: int) -> list[str]:
    said = []
    for config in ({"lr": 0.1, "seed": rank}, {"lr": 0.1, "path": f"/node/{rank}"}):
        try:
            check_same_config(config, Consensus())
        except InputError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_a_difference_is_named_on_all_ranks() -> None:
    sentence = "`seed` must be the same on all ranks, but is 0 on rank 0 and 1 on rank 1."
    assert run_on_ranks(check, 2) == [[sentence, ""]] * 2

"""While nothing happens, a step of our loop communicates and waits for the device no more often than a stock one."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.steady_state import OFF, ON, STOCK, live_recipe, train_epoch
from tests.ranks import run_on_ranks

VARIANTS = (STOCK, ON, OFF)
STEPS = 2  # counted; the first step of an epoch is not
CASES = [
    {"kind": kind, "gradient_accumulation_steps": accumulation, "clip_grad_norm": clip}
    for kind, accumulation, clip in product(("full", "lora"), (1, 2), (None, 1.0))
]


class Counts(NamedTuple):
    """Of ``STEPS`` steps on one rank.

    Collectives on the training group and on the CPU group of ``Consensus``, those on any group as the
    profiler saw them, and tensors read by Python: on a CPU a stand-in for waits for the device. One read is
    of the answer on the CPU group, which on any device waits for the peers but not for the device.
    """

    training: int
    agreement: int
    on_any_group: int
    reads: int


class StepCounter:
    """Takes the place of a recipe's profiler, which is told of each step's end."""

    def __init__(self, recipe: Any) -> None:
        consensus = vars(recipe).get("_consensus")  # stock has none
        self._groups = [dist.group.WORLD, *([consensus._group] if consensus else [])]
        self._tolist = torch.Tensor.tolist
        self._steps = 0
        self.counts: Counts | None = None

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def step(self) -> None:
        self._steps += 1
        if self._steps == 1:
            self._begin()
        if self._steps == 1 + STEPS:
            self._end()

    def _begin(self) -> None:
        self._lists = Counter[str]()

        def tolist(tensor: torch.Tensor) -> Any:  # the one way to read a tensor that the profiler does not see
            self._lists["read"] += 1
            return self._tolist(tensor)

        self._patch = mock.patch.object(torch.Tensor, "tolist", tolist)
        self._patch.start()
        self._before = self._issued()
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.__enter__()

    def _end(self) -> None:
        self._profile.__exit__(None, None, None)
        self._patch.stop()
        names = [event.name for event in self._profile.events() or []]
        training, agreement = (after - before for after, before in zip(self._issued(), self._before, strict=True))
        on_any_group = sum(name.startswith("c10d::") for name in names)
        reads = names.count("aten::_local_scalar_dense") + self._lists["read"]
        self.counts = Counts(training, agreement, on_any_group, reads)

    def _issued(self) -> tuple[int, int]:
        """Collectives so far on the training group and on the CPU group."""
        training, agreement, *_ = [group._get_sequence_number_for_group() for group in self._groups if group] + [0]
        return training, agreement


def _name(case: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())


def _count(rank: int, tiny_dir: Path, output_dir: Path) -> dict[tuple[str, str], Counts]:
    found = {}
    for kind, variant in product(("full", "lora"), VARIANTS):
        options = {"batch_size": 1, "tokenizer__max_seq_len": 32, "dataset__split": "train[:60]"}
        options |= {"max_steps_per_epoch": 1 + STEPS, "epochs": len(CASES)}
        recipe = live_recipe(variant, kind, tiny_dir, output_dir, **options)
        for case in (case for case in CASES if case["kind"] == kind):
            # Set-up takes far longer than these steps, and depends on neither.
            recipe._gradient_accumulation_steps = case["gradient_accumulation_steps"]
            recipe._clip_grad_norm = case["clip_grad_norm"]
            recipe._profiler = counter = StepCounter(recipe)
            train_epoch(recipe)
            assert counter.counts is not None
            found[_name(case), variant] = counter.counts
    return found


@pytest.fixture(scope="module")
def counted(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Counts]]:
    return run_on_ranks(_count, 2, tiny_dir, tmp_path_factory.mktemp("steady_state"))


@pytest.mark.parametrize("case", [_name(case) for case in CASES])
def test_counts(case: str, counted: list[dict[tuple[str, str], Counts]]) -> None:
    for rank in counted:
        print(case, {variant: tuple(rank[case, variant]) for variant in VARIANTS})

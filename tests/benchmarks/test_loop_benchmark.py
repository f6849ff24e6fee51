"""Without out-of-memory errors, an adaptive step has no more collectives and tensor reads than a stock step."""

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.live import Watch, train_again
from benchmarks.loop import OFF, ON, STOCK, recipe_of
from tests.support.ranks import run_on_ranks
from torchtune_adaptive.engine.memory.operations import OperationMode

pytestmark = pytest.mark.exhaustive
STEPS = 2  # counted; the first step of an epoch is not
VARIANTS = (STOCK, ON, OFF)
CASES = [
    {"gradient_accumulation_steps": accumulation, "clip_grad_norm": clip}
    for accumulation, clip in ((1, None), (1, 1.0), (2, None))
]


class Counts(NamedTuple):
    """The counts of ``STEPS`` steps on one rank.

    ``agreement`` collectives were issued on the CPU group of ``Consensus``, ``training`` ones on all others;
    ``reads`` are tensors whose values Python asked for. On the training device each of these is a wait for it.
    """

    training: int
    agreement: int
    reads: int


class CountReads(OperationMode):
    """Counts the tensors whose values Python asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        read_list = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:  # the only way to read that no dispatch mode sees
            self.reads += 1
            return read_list(tensor)

        self._patch = mock.patch.object(torch.Tensor, "tolist", tolist)

    def __enter__(self) -> Any:
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patch.stop()

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs)


class StepCounter(Watch):
    """Counts collectives and reads of tensors in ``STEPS`` steps of an epoch, after its first step."""

    counts: Counts
    _steps = 0

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        before = _numbers()
        if recipe.consensus is not None:
            recipe.consensus.any_rank(False)
        self._agreement = {group for group, number in _numbers().items() if number != before[group]}

    def step(self) -> None:
        self._steps += 1
        if self._steps == 1:
            self._before, self._reads = self._issued(), CountReads()
            self._reads.__enter__()
        if self._steps == 1 + STEPS:
            self._reads.__exit__(None, None, None)
            training, agreement = (now - before for now, before in zip(self._issued(), self._before, strict=True))
            self.counts = Counts(training, agreement, self._reads.reads)

    def _issued(self) -> tuple[int, int]:
        """Collectives so far: of training, and agreements."""
        numbers = _numbers()
        agreement = sum(numbers[group] for group in self._agreement)
        return sum(numbers.values()) - agreement, agreement


def _numbers() -> dict[dist.ProcessGroup, int]:
    """Collectives of each group so far; gloo numbers them, as many as the profiler has events named c10d::."""
    return {
        group: group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
        for group in dist.distributed_c10d._world.pg_map
    }


def _name(case: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())


def _count(rank: int, kind: str, tiny_dir: Path, output_dir: Path) -> dict[str, dict[str, Counts]]:
    found: dict[str, dict[str, Counts]] = {_name(case): {} for case in CASES}
    options: dict[str, Any] = {
        "kind": kind,
        "batch_size": 1,
        "tokenizer__max_seq_len": 32,
        "dataset__split": "train[:60]",
    }
    options |= {"max_steps_per_epoch": 1 + STEPS}
    for case, variant in product(CASES, VARIANTS):
        counter = StepCounter()
        recipe = recipe_of(variant, tiny_dir=tiny_dir, output_dir=output_dir, watch=counter, **options, **case)
        train_again(recipe, seed=0)
        found[_name(case)][variant] = counter.counts
    return found


@pytest.fixture(scope="module", params=["full", "lora"])
def counted(
    request: pytest.FixtureRequest, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, Counts]]]:
    return run_on_ranks(_count, 2, request.param, tiny_dir, tmp_path_factory.mktemp("loop"))


@pytest.fixture(params=[_name(case) for case in CASES])
def by_variant(request: pytest.FixtureRequest, counted: list[dict[str, dict[str, Counts]]]) -> dict[str, Counts]:
    first, second = (rank[request.param] for rank in counted)
    assert first == second
    return first


def test_a_step_has_no_more_collectives_than_a_stock_one_and_fewer_reads(by_variant: dict[str, Counts]) -> None:
    """Loss and tokens share one collective; recovery adds one on the CPU group, and the reading of its answer."""
    stock, on, off = (by_variant[variant] for variant in VARIANTS)
    assert off == (stock.training - STEPS, 0, STEPS)
    assert on == (off.training, STEPS, off.reads + STEPS)
    assert (stock.agreement, stock.reads) == (0, 2 * STEPS)
    assert off.training > 10 * STEPS

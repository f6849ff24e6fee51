"""A run begins with the sizes of config or search, or resumes from a checkpoint of this package or of torchtune."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.support.loaders import step_loader
from tests.support.toys import STATE, search_result
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.batch.growth import BatchGrowth
from torchtune_adaptive.training.run_state import AdaptiveState
from torchtune_adaptive.training.sizes import Sizes
from torchtune_adaptive.training.start import StartingPoint, starting_point

EPOCHS = 4
DATASET: Any = [{"tokens": [0]}] * 240  # with 2 micro-steps and 1 rank, 120 rows per micro-step are an epoch
SEARCHED = Sizes(result=search_result(), seq_len=1, fitting_rows=8)
SAVED = replace(STATE, batch_size=7, global_step=77, config={"use_maximum_batch_size": True})


def adds_two(epoch: int, current_batch_size: int) -> int:
    return 2


class Case(NamedTuple):
    """What a run begins from, with the config's ``batch_size`` of 4; ``config`` has fields of `AdaptiveSettings`."""

    config: dict[str, Any]
    sizes: Sizes = Sizes()
    is_global: bool = False
    batch_size: int = 4
    epochs_run: int = 0
    saved: AdaptiveState | None = None

    def start(self) -> tuple[StartingPoint, BatchGrowth]:
        settings = AdaptiveSettings(**self.config)
        loader = step_loader(DATASET, batch_size=self.batch_size, micro_steps=2, is_global=self.is_global)
        function = settings.batch_increase_function
        growth = BatchGrowth(function, total_epochs=EPOCHS, samples_per_unit=2, consensus=Consensus())
        start = starting_point(
            loader, growth, self.sizes, settings=settings, epochs_run=self.epochs_run, saved=self.saved
        )
        assert loader.batch_size == self.batch_size
        return start, growth


GROWS: dict[str, Any] = {"batch_increase_function": adds_two}
MAXIMUM: dict[str, Any] = {"use_maximum_batch_size": True}
GLOBAL: dict[str, Any] = {"global_batch_size": 12}
FAST = replace(SEARCHED, fitting_rows=4)  # the smallest of the sizes that are as fast as the best

# Where each begins, and the largest batch size to which it may grow.
CASES = {
    "as the config says": (Case({}), StartingPoint(4, 0, 30), 120),
    "with what was found": (Case(MAXIMUM, SEARCHED), StartingPoint(8, 0, 15), 8),
    "with what was found to be fast": (Case(MAXIMUM, FAST), StartingPoint(4, 0, 30), 8),
    "growing to what was found": (Case(GROWS, SEARCHED), StartingPoint(4, 0, 30), 8),
    "as large as fits, above the power of two": (Case(GROWS, SEARCHED, batch_size=13), StartingPoint(13, 0, 9), 8),
    "growing to a number": (Case(GROWS | {"growth_limit": 20}, SEARCHED), StartingPoint(4, 0, 30), 20),
    "growing without a bound": (Case(GROWS | {"growth_limit": "none"}, SEARCHED), StartingPoint(4, 0, 30), 120),
    "above what fits, without growing": (Case({}, SEARCHED, batch_size=20), StartingPoint(20, 0, 6), 8),
    "a global batch in micro-batches as found": (
        Case(GLOBAL | MAXIMUM, SEARCHED, is_global=True, batch_size=12),
        StartingPoint(12, 0, 20),
        8,
    ),
    "of stock, as if the batch had grown": (  # 6 and 8 rows: 20 and 15 steps
        Case(GROWS, SEARCHED, epochs_run=2),
        StartingPoint(8, 35, 30),
        8,
    ),
    "ours": (Case({}, epochs_run=2, saved=SAVED), StartingPoint(4, 77, 25), 120),
    "ours, with what had been found": (Case(MAXIMUM, SEARCHED, epochs_run=2, saved=SAVED), StartingPoint(7, 77, 25), 8),
    "ours, with what is found now, where no search was before": (
        Case(MAXIMUM, SEARCHED, epochs_run=2, saved=replace(SAVED, config={})),
        StartingPoint(8, 77, 25),
        8,
    ),
    "ours, with a global batch that had grown and another at the start": (
        Case(
            GLOBAL | GROWS | {"growth_limit": 20}, Sizes(), True, 12, epochs_run=2, saved=replace(SAVED, is_global=True)
        ),
        StartingPoint(7, 77, 25),
        20,
    ),
    "ours, within an epoch, with what the batch had grown to in it": (
        Case(GROWS, SEARCHED, epochs_run=2, saved=replace(SAVED, epoch_samples=28)),
        StartingPoint(7, 77, 25, epoch_steps=2),
        8,
    ),
    "ours, within an epoch, where a step of the present size begins": (
        Case({}, epochs_run=2, saved=replace(SAVED, epoch_samples=47)),
        StartingPoint(4, 77, 25, epoch_steps=5),
        120,
    ),
    "ours, from a global batch to rows within an epoch, whose increase is in the plan": (
        Case(GROWS, SEARCHED, epochs_run=1, saved=replace(SAVED, is_global=True, epoch_samples=32)),
        StartingPoint(8, 77, 25, epoch_steps=2),
        8,
    ),
    "ours, from rows to a global batch that grows": (
        Case(GLOBAL | GROWS | {"growth_limit": "none"}, is_global=True, batch_size=12, epochs_run=2, saved=SAVED),
        StartingPoint(16, 77, 25),
        240,
    ),
    "ours, from a global batch to rows": (
        Case(GROWS, SEARCHED, epochs_run=1, saved=replace(SAVED, is_global=True)),
        StartingPoint(6, 77, 25),
        8,
    ),
}


@pytest.mark.parametrize(("case", "expected", "maximum"), CASES.values(), ids=list(CASES))
def test_a_run_begins_or_resumes(case: Case, expected: StartingPoint, maximum: int) -> None:
    start, growth = case.start()
    assert (start, growth.maximum) == (expected, maximum)


@pytest.mark.parametrize(("bound", "what"), [(100, "that fits"), (13, "that the data set and max_batch_size allow")])
def test_a_batch_that_is_to_grow_and_does_not_fit_is_refused(bound: int, what: str) -> None:
    sizes = replace(SEARCHED, result=search_result(bound=bound))
    with pytest.raises(InputError) as refused:
        Case(GROWS, sizes, batch_size=14).start()
    assert str(refused.value) == f"`batch_size` must be at most the largest {what} (13), but is 14 instead."

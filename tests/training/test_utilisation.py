"""The operations of the first micro-step that succeeds are counted, and a run logs what they are of the card's peak."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_assembly import Recipe, same_weights, train
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.testing import out_of_memory
from torchtune_adaptive.training import utilisation
from torchtune_adaptive.training.batch.limits import RowLimit
from torchtune_adaptive.training.batch.micro_batches import MicroBatch, MicroBatcher
from torchtune_adaptive.training.batch.row_format import TokenRows
from torchtune_adaptive.training.utilisation import Utilisation

ROWS = [{"tokens": [0] * length, "labels": [0] * length} for length in (3, 5)]


def watched(peak: float | None) -> Utilisation:
    return Utilisation(MicroBatcher(RowLimit(8), TokenRows(-100), Consensus(), []), peak=peak)


def product(_: MicroBatch) -> Any:
    return torch.ones(7, 10) @ torch.ones(10, 2)


def test_only_the_first_micro_step_that_succeeds_is_counted() -> None:
    steps = iter([lambda _: out_of_memory(), lambda _: None, lambda _: None])

    def failing_once(micro_batch: MicroBatch) -> Any:
        product(micro_batch)
        return next(steps)(micro_batch)

    found = watched(peak=1e3)
    run = found.counting(failing_once)
    with pytest.raises(torch.OutOfMemoryError):
        run(MicroBatch(ROWS))
    assert found.share(10, 1.0) is None
    run(MicroBatch(ROWS))
    run(MicroBatch(ROWS[:1]))
    assert found.flops_per_token == 2 * 7 * 10 * 2 / 10  # two rows of five tokens, one padded
    assert found.share(100, seconds=2.0) == 28 * 100 / 2 / 1e3


def test_nothing_is_counted_without_a_known_peak() -> None:
    found = watched(peak=None)
    found.counting(product)(MicroBatch(ROWS))
    assert (found.flops_per_token, found.share(10, 1.0)) == (None, None)


def test_a_run_logs_its_utilisation_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual, counted = Recipe(tmp_path / "usual"), Recipe(tmp_path / "counted")
    losses = [one["loss"] for one in train(usual)]
    monkeypatch.setattr(utilisation, "peak_flops", lambda *_: 1e12)
    trainer = counted.trainer()
    assert trainer.step_log.utilisation.flops_per_token is None  # not that of the dry run, whose rows are short
    trainer.train()
    steps = counted.logger.steps
    assert [one["loss"] for one in steps] == losses
    assert same_weights(usual.model, counted.model)
    assert all(0 < one["mfu"] < 1 for one in steps)
    assert "of the card's 1 TFLOPS" in caplog.text

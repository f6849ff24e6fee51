"""The progress bar of a step that is traced whole counts the passes through layers."""

import pytest

from torchtune_adaptive.plan.step_events import Operation
from torchtune_adaptive.plan.step_progress import StepProgress


def _run(progress: StepProgress, *steps: tuple[str, str]) -> int:
    for phase, module in steps:
        progress.after(Operation("mm", phase, module))
    return progress.num_passes


def test_each_pass_through_a_layer_counts_once() -> None:
    forward = [("forward", name) for name in ("tok_embeddings", "layers.0", "layers.0.mlp", "layers.1.attn", "output")]
    backward = [("backward", name) for name in ("loss", "output", "layers.1", "layers.0.mlp", "layers.1", "model")]
    others = [("loss", "loss"), ("loss", "layers.0"), ("optimizer", "layers.1")]
    with StepProgress(is_shown=False) as progress:
        assert _run(progress, *forward) == 2
        assert _run(progress, ("forward", "frozen model.layers.0.mlp")) == 3
        assert _run(progress, *others[:2]) == 3
        assert _run(progress, *backward) == 5
        assert _run(progress, *forward, *backward, others[2]) == 9  # the next micro-batch


def test_the_bar_shows_the_number_of_passes_and_the_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with StepProgress(is_shown=True) as progress:
        progress.start("models")
        progress.start("optimizer's state", num_passes=4)
        _run(progress, ("forward", "layers.0"), ("forward", "layers.1"))
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert any("models" in line for line in lines)
    assert any("0/4" in line and "optimizer's state" in line for line in lines)
    assert "2/4 [" in lines[-1]
    assert "forward" in lines[-1]

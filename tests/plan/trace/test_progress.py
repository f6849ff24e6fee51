"""The progress bar of a step that is traced whole counts the passes through layers."""

from torchtune_adaptive.plan.trace.events import Operation
from torchtune_adaptive.plan.trace.progress import StepProgress


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

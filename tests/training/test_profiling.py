"""The profiler advances once per step, and the memory history covers the steps asked for."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchtune_adaptive.errors import RunEnded
from torchtune_adaptive.training.profiling import StepProfiler


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of torchtune's profiler and of CUDA's memory history, in order."""
    made: list[str] = []

    def record_memory_history(**options: object) -> None:
        made.append(f"history{options or ''}")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record_memory_history)
    return made


def profiler_of(calls: list[str], *, memory_steps: range | None = None) -> StepProfiler:
    torchtunes = SimpleNamespace(**{name: partial(calls.append, name) for name in ("start", "step", "stop")})
    return StepProfiler(torchtunes, memory_steps=memory_steps)


def run(profiler: StepProfiler, calls: list[str], *, epochs: int = 2, steps: int = 5) -> dict[str, list[str]]:
    """The calls before and after each step, by "epoch.step", and around training."""
    with profiler.running():
        asked = {"begin": calls.copy()}
        for epoch in range(epochs):
            for step in range(1, steps + 1):
                calls.clear()
                profiler.begin_step(epoch, step)
                calls.append("training")
                profiler.end_step(epoch, step)
                asked[f"{epoch}.{step}"] = calls.copy()
        calls.clear()
    return asked | {"end": calls}


@pytest.mark.parametrize(
    ("end", "made"),
    [
        (RunEnded("a signal", 75), ["start", "stop"]),
        (ValueError("of one rank"), ["start"]),
    ],
)
def test_an_end_of_all_ranks_stops_the_profiler_and_an_error_does_not(
    end: Exception, made: list[str], calls: list[str]
) -> None:
    """Stopping the profiler is a collective if it writes a trace."""
    with pytest.raises(type(end)) as caught, profiler_of(calls).running():
        raise end
    assert caught.value is end
    assert calls == made


@pytest.mark.parametrize(("active", "end"), [(1, None), (3, RunEnded("a signal", 75))])
def test_a_trace_that_cannot_be_written_is_logged_and_hides_nothing(
    active: int, end: Exception | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a step, or at the end of training if that comes earlier."""
    (tmp_path / "traces").write_text("where the folder was")
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=active, repeat=1),
        on_trace_ready=lambda profiler: (tmp_path / "traces" / "iteration_2").mkdir(),
    )
    steps = StepProfiler(profiler, memory_steps=None)
    with pytest.raises(RunEnded) if end else nullcontext(), steps.running():
        for step in range(1, 4):
            steps.end_step(0, step)
        if end is not None:
            raise end
    (message,) = caplog.messages
    assert message.startswith("Profile not written: NotADirectoryError")


@pytest.mark.parametrize(
    ("memory_steps", "first", "last"),
    [(range(2, 5), "0.2", "0.4"), (None, "", "")],
)
def test_the_profiler_steps_with_training_and_memory_history_is_recorded_in_its_steps_of_the_first_epoch(
    calls: list[str], memory_steps: range | None, first: str, last: str
) -> None:
    asked = run(profiler_of(calls, memory_steps=memory_steps), calls)
    expected = {place: ["training", "step"] for place in asked} | {"begin": ["start"], "end": ["stop"]}
    if memory_steps is not None:
        expected[first] = ["history", *expected[first]]
        expected[last] = [*expected[last][:-1], "history{'enabled': None}", "step"]
    assert asked == expected

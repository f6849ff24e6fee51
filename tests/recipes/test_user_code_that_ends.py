"""Code of a run that would end its process ends the run with one sentence and status 1, on every rank."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import tune_run
from tests.support.recipe_runs import adaptive_recipe, shallow_assets
from torchtune_adaptive.launch import launch

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata 0.11

GENERAL = "Code of the run raised "
CREATED = "`{}` cannot be created from {{"
GROWTH = "`batch_increase_function` "
PLACES = {
    "samples": ("dataset._component_=ending_code.Samples", GENERAL),
    "data set": ("dataset._component_=ending_code.samples", CREATED.format("dataset")),
    "data set's module": ("dataset._component_=ends_on_import.Samples", GENERAL),
    "loss": ("loss._component_=ending_code.CEWithChunkedOutputLoss", GENERAL),
    "metric logger": ("metric_logger._component_=ending_code.Logger", GENERAL),
    "growth, later": ("batch_increase_function=ending_code.grow_later", f"{GROWTH}ending_code.grow_later failed at "),
    "growth's module": (
        "batch_increase_function=ends_on_import.grow",
        f"{GROWTH}cannot be imported from 'ends_on_import.grow'",
    ),
    "growth's set-up": (
        "batch_increase_function._component_=ending_code.Growth",
        f"{GROWTH}cannot be created by 'ending_code.Growth' with ",
    ),
}


def arguments(tiny_dir: Path, output_dir: Path, *overrides: str) -> list[str]:
    return [
        "--config",
        "tiny/full",
        f"tiny_dir={shallow_assets(tiny_dir)}",
        f"output_dir={output_dir}",
        *("model.num_layers=2", "epochs=2", "max_steps_per_epoch=2", "batch_size=2", "tokenizer.max_seq_len=64"),
        *("adaptive.oom_recovery=False", "dataset.split=train[:16]", *overrides),
    ]


@pytest.fixture
def run(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[Any, str]]]:
    """Launches the recipe for one device in this process, with overrides; its status and the last line it printed."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(*overrides: str) -> tuple[Any, str]:
        monkeypatch.setattr("sys.argv", ["recipe.py", *arguments(tiny_dir, tmp_path / "out", *overrides)])
        with pytest.raises(SystemExit) as end:
            launch(adaptive_recipe("full_single"))
        return end.value.code, capsys.readouterr().err.splitlines()[-1]

    yield run
    signal.signal(signal.SIGINT, before)
    sys.modules.pop("ends_on_import", None)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_the_sentence_names_what_was_raised_and_where(place: str, run: Callable[..., tuple[Any, str]]) -> None:
    override, sentence = PLACES[place]
    status, last = run(override)
    raised, file = ("0", "ends_on_import") if "module" in place else ("no more data", "ending_code")
    assert status == 1
    assert f"recipe: {sentence}" in last
    assert re.search(rf"SystemExit: {raised} \({file}\.py, line \d+\)\.$", last)


@pytest.mark.slow
def test_samples_that_end_the_iteration_do_not_end_an_epoch(run: Callable[..., tuple[Any, str]]) -> None:
    status, last = run("dataset._component_=ending_code.StoppingSamples")
    sentence = "`dataset` ended an epoch after 0 of 2 steps: a sample raised StopIteration."
    assert (status, last) == (1, f"recipe: {sentence}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("place", "rank"),
    [
        *((place, 1) for place in ("samples", "data set", "loss", "growth, later")),
        *((place, 0) for place in ("metric logger", "growth, later")),
    ],
)
def test_the_other_rank_ends_without_a_traceback_of_its_own(
    place: str, rank: int, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun prints the only one. The growth function is called on rank 0."""
    monkeypatch.setenv("ENDING_RANK", str(rank))
    override, sentence = PLACES[place]
    options = arguments(tiny_dir, tmp_path / "out", override)
    ended = tune_run("--nproc_per_node", "2", "adaptive_full_finetune_distributed", *options, directory=tmp_path)
    said = re.findall("adaptive_full_finetune_distributed: .*", ended.stderr)
    if "growth" in place and rank == 1:
        assert (ended.returncode, said) == (0, [])
        return
    assert ended.returncode == 1
    assert len(said) == 1
    assert f"distributed: {sentence}" in said[0]
    assert ended.stderr.count("Traceback") == 1
    assert "gloo" not in ended.stderr

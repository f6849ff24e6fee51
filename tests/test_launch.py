"""A refusal is printed once per node, whichever ranks refuse; without torchrun, a launch has one process."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.support.full_disk import FullDisk
from torchtune_adaptive import launch
from torchtune_adaptive.errors import CheckpointError, InputError, RunEnded


@pytest.fixture(autouse=True)
def interrupts_as_before() -> Iterator[None]:
    """Restores the handler of Ctrl-C, which a launch changes in this process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """Makes this process a rank of a node, with the environment that torchrun gives it."""
    monkeypatch.setattr("sys.argv", ["/recipes/recipe.py"])

    def become(rank: int) -> None:
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))

    become(0)
    return become


def test_only_the_first_rank_of_a_node_with_a_refusal_prints_it(
    torchrun: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (2, 0, 1):
        torchrun(rank)
        launch._say_once(f"`margin` is wrong, says rank {rank}.")
    assert capsys.readouterr().err == "recipe: `margin` is wrong, says rank 2.\n"


def test_torchruns_report_ends_with_the_refusal(torchrun: Callable[[int], None], tmp_path: Path) -> None:
    failures = {}
    for rank in (0, 1):
        torchrun(rank)
        launch._say_once("`margin` is wrong.")
        file = str(tmp_path / str(rank) / "error.json")
        failures[rank] = ProcessFailure(local_rank=rank, pid=rank, exitcode=1, error_file=file)
    *_, last, line = str(ChildFailedError("recipe", failures)).splitlines()
    assert (last.strip(), set(line)) == ("traceback : `margin` is wrong.", {"="})


def test_a_rank_waits_until_another_has_printed_it(torchrun: Callable[[int], None], tmp_path: Path) -> None:
    """Otherwise the launcher could end the other rank before it has printed."""
    speaker = subprocess.Popen(
        [sys.executable, "-c", SLOW_SPEAKER, str(tmp_path / "torchtune_adaptive_said")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert speaker.stdout is not None
    assert speaker.stdout.readline() == b"locked\n"
    torchrun(1)
    listener = threading.Thread(target=launch._say_once, args=("too late.",))
    listener.start()
    listener.join(0.1)
    assert listener.is_alive()
    speaker.communicate()
    listener.join(60)
    assert not listener.is_alive()


SLOW_SPEAKER = """
import fcntl, sys
with open(sys.argv[1], "a+") as said:
    fcntl.lockf(said, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
    said.write("said")
"""


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("place", ["", "/no/such/folder/0/error.json"])
def test_without_torchruns_folder_every_rank_prints_it(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", place)
    launch._say_once("a signal ended the run.")
    launch._say_once("a signal ended the run.")
    assert capsys.readouterr().err == "recipe: a signal ended the run.\n" * 2


@pytest.mark.usefixtures("torchrun")
def test_on_a_full_disk_every_rank_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with FullDisk(os, "write", stays_full=True):
        launch._say_once("a signal ended the run.")
        launch._say_once("a signal ended the run.")
    assert capsys.readouterr().err == "recipe: a signal ended the run.\n" * 2


class Nodes:
    """Replaces the watch of other nodes, and records what is sent to them."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self.told: list[str | None] = []
        self.news_awaited = 0
        Nodes.last = self

    last: "Nodes"

    def close(self, reason: str | None) -> None:
        self.told.append(reason)

    def wait_for_news(self) -> None:
        self.news_awaited += 1


class Launched:
    """Launches with a run that only ends with ``ended_by``, in an environment without a launcher."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended_by: BaseException | None = None
        self.started = 0
        for name in RANK_VARIABLES:
            monkeypatch.setenv(name, "")  # so that the end of the test restores it
            monkeypatch.delenv(name)
        monkeypatch.setattr("sys.argv", ["/recipes/recipe.py", "--config", "tiny/full"])
        monkeypatch.setattr("torchtune_adaptive.training.nodes.watch_nodes", Nodes)
        monkeypatch.setattr(launch, "run_recipe", self._run)
        monkeypatch.setattr(launch, "_leave", sys.exit)  # with several ranks it would end this process at once

    def _run(self, recipe_class: object, cfg: DictConfig) -> None:
        self.started += 1
        if self.ended_by is not None:
            raise self.ended_by

    def status(self, *, on_several_ranks: bool = True) -> int:
        """The exit status of a launch."""
        with pytest.raises(SystemExit) as end:
            launch.launch(cast(Any, SimpleNamespace(on_several_ranks=on_several_ranks)))
        return cast(int, end.value.code or 0)


RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # a process group of an earlier test has replaced it
    return Launched(monkeypatch)


def after_a_collective(error: Exception) -> Exception:
    error.__cause__ = RuntimeError("Closed by peer")
    return error


@pytest.mark.parametrize(
    ("ended_by", "status", "sentence", "told", "awaits_news"),
    [
        (None, 0, "", None, 0),
        (RunEnded("a signal ended the run.", 75), 75, "recipe: a signal ended the run.", None, 0),
        (InputError("`x` is wrong."), 1, "recipe: `x` is wrong.", "`x` is wrong.", 0),
        (after_a_collective(InputError("no set-up.")), 1, "recipe: no set-up.", "no set-up.", 1),
        (CheckpointError("a full disk."), 1, "recipe: a full disk.", "a full disk.", 0),
        (KeyError("a bug"), 1, "KeyError: 'a bug'", "KeyError: 'a bug'.", 0),
        (RuntimeError("Closed by peer"), 1, "RuntimeError: Closed by peer", "RuntimeError: Closed by peer.", 1),
    ],
)
def test_status_sentence_and_other_nodes_say_how_the_run_ended(
    ended_by: BaseException | None,
    status: int,
    sentence: str,
    told: str | None,
    awaits_news: int,
    launched: Launched,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error that is no refusal keeps its traceback."""
    launched.ended_by = ended_by
    assert launched.status() == status
    *above, last = capsys.readouterr().err.splitlines() or [""]
    assert last == sentence
    assert any("in _run" in line for line in above) == (not sentence.startswith("recipe") and sentence != "")
    assert (Nodes.last.told, Nodes.last.news_awaited) == ([told], awaits_news)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


@pytest.mark.parametrize("ended_by", [SystemExit(0), KeyboardInterrupt()])
def test_code_of_a_run_that_would_end_the_process_is_an_error(
    ended_by: BaseException, launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    launched.ended_by = ended_by
    assert launched.status() == 1
    said = capsys.readouterr().err
    assert said.startswith(f"recipe: Code of the run raised {type(ended_by).__name__}")
    assert "(test_launch.py, line " in said
    assert (said.count("\n"), Nodes.last.told) == (1, [said.removeprefix("recipe: ").rstrip()])


@pytest.mark.parametrize(("error", "is_shown"), [(RuntimeError("Closed by peer"), False), (KeyError("a bug"), True)])
def test_a_collective_that_fails_after_another_rank_has_said_why_prints_nothing(
    error: Exception,
    is_shown: bool,
    torchrun: Callable[[int], None],
    launched: Launched,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torchrun(1)
    launch._say_once("`margin` is wrong.")
    capsys.readouterr()
    torchrun(0)
    launched.ended_by = error
    assert launched.status() == 1
    assert ("Traceback" in capsys.readouterr().err) == is_shown
    report = (tmp_path / "0" / "error.json").read_text()
    assert ("another rank has ended the run, and said why." in report) == (not is_shown)


@pytest.mark.parametrize("on_several_ranks", [True, False])
def test_without_a_launcher_what_an_earlier_one_has_left_is_no_rank(
    on_several_ranks: bool, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "192.0.2.1"}.items():
        monkeypatch.setenv(name, value)
    assert (launched.status(on_several_ranks=on_several_ranks), launched.started) == (0, 1)
    # A recipe for one device needs no process group, and gets nothing to start one with.
    expected = ["0", "1", "0"] if on_several_ranks else [None, "2", "1"]
    assert [os.environ.get(name) for name in RANK_VARIABLES] == expected


def test_the_environment_of_torchruns_ranks_is_unchanged(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    before = dict(os.environ)
    assert (launched.status(), launched.started) == (0, 1)
    assert dict(os.environ) == before


def test_a_config_that_is_missing_is_named_before_anything_starts_and_help_has_status_0(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["recipe", "--config", "tiny/full", "--help"])
    assert (launched.status(), launched.started) == (0, 0)
    monkeypatch.setattr("sys.argv", ["recipe", "--config", "no/such"])
    assert (launched.status(), launched.started) == (1, 0)
    expected = "recipe: `--config` must be the name or path of a config, but is 'no/such' instead.\n"
    assert capsys.readouterr().err == expected


def test_a_recipe_for_one_device_refuses_several_processes_before_it_starts(
    torchrun: Callable[[int], None],
    launched: Launched,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (0, 1, 2):
        torchrun(rank)
        assert launched.status(on_several_ranks=False) == 1
    assert launched.started == 0
    expected = "recipe: `--nproc_per_node` must be 1 for a single-device recipe, but is 3 instead.\n"
    assert capsys.readouterr().err == expected


class Recipe:
    """Records its calls in ``done``, and ends its training with ``ended_by``."""

    on_several_ranks = False
    done: ClassVar[list[str]]
    ended_by: Exception | None = None

    def __init__(self, cfg: DictConfig) -> None: ...

    def setup(self, cfg: DictConfig) -> None:
        self.done.append("setup")

    @contextmanager
    def listening(self) -> Iterator[None]:
        self.done.append("listen")
        yield
        self.done.append("no longer listen")

    def train(self) -> None:
        self.done.append("train")
        if self.ended_by is not None:
            raise self.ended_by

    def cleanup(self) -> None:
        self.done.append("cleanup")


@pytest.fixture
def recipe() -> Any:
    return type("Fresh", (Recipe,), {"done": []})


@pytest.mark.parametrize(
    ("device", "several_ranks", "backends"),
    [("cuda", True, ["cuda:nccl,cpu:gloo"]), ("cpu", False, []), (None, True, ["gloo"])],
)
def test_a_recipe_of_several_ranks_has_a_group_that_can_decide_on_the_cpu(
    device: str | None, several_ranks: bool, backends: list[str], recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    recipe.on_several_ranks = several_ranks
    monkeypatch.setattr("torchtune_adaptive.stock.load.start_process_group", started.append)
    monkeypatch.setattr("torchtune_adaptive.stock.checks.check_device", lambda cfg: None)  # there may be no GPU
    monkeypatch.setattr("torchtune.config.log_config", lambda recipe_name, cfg: recipe.done.append("print"))
    monkeypatch.setattr("torchtune.utils.get_device", lambda: torch.device("cpu"))  # the best that there is
    launch.run_recipe(recipe, DictConfig({"device": device}))
    assert started == backends
    assert recipe.done == ["setup", "print", "listen", "train", "no longer listen", "cleanup"]


@pytest.mark.parametrize("offloads", [True, False])
def test_an_optimizer_on_the_cpu_uses_all_its_cores(
    offloads: bool, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun gives each rank one thread; torchtune's recipes that can offload raise that."""
    monkeypatch.setattr("torchtune.training.set_torch_num_threads", lambda: recipe.done.append("threads"))
    launch.run_recipe(recipe, DictConfig({"device": "cpu", "fsdp_cpu_offload": offloads}))
    assert (recipe.done[0] == "threads") == offloads


@pytest.mark.parametrize(
    ("error", "ends_together"),
    [(RunEnded("a signal", 75), True), (CheckpointError("a full disk"), False), (ZeroDivisionError(), False)],
)
def test_ranks_clean_up_together_only_where_all_of_them_end_at_the_same_step(
    error: Exception, ends_together: bool, recipe: Any
) -> None:
    recipe.ended_by = error
    with pytest.raises(type(error)):
        launch.run_recipe(recipe, DictConfig({"device": "cpu"}))
    assert ("cleanup" in recipe.done) == ends_together


def test_a_device_that_is_missing_is_refused_before_anything_starts(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(InputError, match="`device`"):
        launch.run_recipe(recipe, DictConfig({"device": "cuda"}))
    assert recipe.done == []


def test_a_refusal_in_a_run_names_our_keys_as_the_config_does(recipe: Any) -> None:
    recipe.ended_by = InputError("`memory_limit` must be given.")
    with pytest.raises(InputError) as refused:
        launch.run_recipe(recipe, DictConfig({"device": "cpu"}))
    assert str(refused.value) == "`adaptive.memory_limit` must be given."

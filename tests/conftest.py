"""Fixtures for every test: no network, and tiny assets made once per session."""

import fcntl
import functools
import gc
import inspect
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("tests", derandomize=True, deadline=None)  # a busy machine is slow
hypothesis.settings.load_profile("tests")
gc.disable()  # until tests are collected: a third of the time of imports would go into a search for garbage
os.environ["HF_HUB_OFFLINE"] = "1"  # read when `datasets` is imported, so before any fixture
# Under `nohup` it is ignored, and so it would be by the runs that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
_START_PROCESSES = {"run_on_ranks", "run_alone", "tune_run", "launched", "subprocess", "getfixturevalue"}


def pytest_configure() -> None:
    """Each process of pytest-xdist keeps to a processor of its own, with the ranks that its tests start.

    Two ranks on one processor take turns. On two, each collective would wake the other one, which takes longer.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[int(worker.removeprefix("gw")) % len(processors)]})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes, and run their files first: no processor should be idle at the end."""
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
        functions = [getattr(item, "function", None), *(one.func for definitions in fixtures for one in definitions)]
        if any(_starts_processes(function) for function in functions if inspect.isfunction(function)):
            item.add_marker("processes")
    with_processes = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: item.path not in with_processes)


def pytest_collection_finish() -> None:
    gc.enable()


@functools.cache
def _starts_processes(function: Any) -> bool:
    """Whether a function of a test, or one that it calls, uses a name of ``_START_PROCESSES``."""
    codes, names = [inspect.unwrap(function).__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    of_module = inspect.unwrap(function).__globals__
    called = [inspect.unwrap(of_module[name]) for name in names - {function.__name__} if callable(of_module.get(name))]
    ours = [one for one in called if inspect.isfunction(one) and one.__module__.startswith(("tests.", "benchmarks."))]
    return not _START_PROCESSES.isdisjoint(names) or any(_starts_processes(one) for one in ours)


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> Iterator[None]:
    """Garbage collections in tests skip all that this process has imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A process group that the tests of a file have started in this process ends with the file."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def quick_disk() -> Iterator[None]:
    """Nothing in this process waits for a disk. Ranks and programs that tests start do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses a closed file too
        yield


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """A process group with this process alone."""
    import torch.distributed as dist  # takes seconds; not every process needs it

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def hugging_face_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Prepared data sets go to a directory of the session, here and in processes started by tests."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("hugging_face")
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_DATASETS_CACHE", str(home / "datasets"))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", home / "datasets")
        yield home


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches for later runs go to a directory of the session, not to the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs ``tune-adaptive`` in this process."""
    from tests.support.program import Program  # takes seconds; not every process needs it

    return Program(capsys)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data, tokenizer and model, with 400 samples, made once per session; tests must not write into it.

    If several processes run tests, the first makes them for all. Each has links to them in a folder of its own.
    """
    from torchtune_adaptive.tiny import make_tiny_assets  # takes seconds; not every process needs it

    directory, base = tmp_path_factory.mktemp("tiny"), tmp_path_factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny_made"
    made.mkdir(exist_ok=True)
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_tiny_assets(made, num_samples=400)
    for path in made.iterdir():
        (directory / path.name).symlink_to(path)
    return directory

"""Fixtures for every test: no network, and tiny assets made once per session."""

import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when `datasets` is imported, so before any fixture
_START_PROCESSES = {"run_on_ranks", "run_alone", "tune_run"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files that start processes first: they take longest, and no processor should be idle at the end."""
    items.sort(key=lambda item: _START_PROCESSES.isdisjoint(dir(getattr(item, "module", None))))


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> Iterator[None]:
    """Garbage collections in tests skip all that this process has imported."""
    gc.freeze()
    yield
    gc.unfreeze()


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

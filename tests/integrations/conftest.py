"""A fixture for the tests of other packages' trainers."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def folder_of_trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The folder of ``FOLDER_OF_TRAINERS``, which trainers write to, in this process and in those that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLDER_OF_TRAINERS", str(tmp_path_factory.mktemp("trainers")))
        yield

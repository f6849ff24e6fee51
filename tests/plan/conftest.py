"""Fixtures for plans."""

import pytest


@pytest.fixture(autouse=True)
def usual_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the allocator settings of the machine that runs the tests."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)

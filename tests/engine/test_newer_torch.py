"""A torch that no test has seen gives one warning; it is not refused."""

import warnings

import pytest

from torchtune_adaptive import engine


@pytest.mark.parametrize(
    ("version", "local_rank", "told"),
    [
        ("2.15.0+cpu", "0", []),
        ("2.16.0", "0", ["torchtune_adaptive is tested up to torch 2.15, but 2.16.0 is installed."]),
        ("3.0.0a0+git", "0", ["torchtune_adaptive is tested up to torch 2.15, but 3.0.0a0+git is installed."]),
        ("2.16.0", "1", []),
    ],
)
def test_only_a_newer_torch_gives_a_warning_and_only_on_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, version: str, local_rank: str, told: list[str]
) -> None:
    monkeypatch.setattr(engine, "version", lambda name: version)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.warn_of_newer_torch()
    assert [str(one.message) for one in caught] == told

"""The tiny assets: the same bytes for the same arguments, and made again unless they are complete."""

import functools
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from torchtune import config

from torchtune_adaptive import tiny
from torchtune_adaptive.stock.configs import load_config
from torchtune_adaptive.tiny import make_tiny_assets


def contents(directory: Path) -> list[bytes]:
    names = (tiny.DATA_NAME, tiny.PAIRS_NAME, tiny.TOKENIZER_NAME, tiny.MODEL_NAME)
    return [(directory / name).read_bytes() for name in names]


@pytest.fixture
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are those of one package: to read the whole standard library takes long."""
    package = Path(sysconfig.get_path("stdlib")) / "asyncio"
    monkeypatch.setattr(tiny, "sysconfig", SimpleNamespace(get_path=lambda _: str(package)))
    for name in ("_stdlib_samples", "_tokenizer"):
        monkeypatch.setattr(tiny, name, functools.cache(getattr(tiny, name).__wrapped__))


@pytest.mark.usefixtures("small_library")
def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    make_tiny_assets(tmp_path / "first", num_samples=200)
    tiny._stdlib_samples.cache_clear()
    tiny._tokenizer.cache_clear()
    make_tiny_assets(tmp_path / "second", num_samples=200)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


@pytest.mark.slow  # no other test of `make fast` needs `tiny_dir`, which takes seconds to make
def test_every_sample_has_a_label_to_learn(tiny_dir: Path) -> None:
    cfg = OmegaConf.merge(load_config("tiny/full"), {"tiny_dir": str(tiny_dir)})
    dataset = config.instantiate(cfg.dataset, config.instantiate(cfg.tokenizer))
    assert len(dataset) == 400
    assert all(any(label != -100 for label in sample["labels"]) for sample in dataset)


@pytest.mark.usefixtures("small_library")
@pytest.mark.parametrize("remaking", [False, True])
def test_assets_of_a_killed_run_are_made_again_and_complete_ones_are_kept(
    remaking: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_killed(_: Path) -> None:
        raise KeyboardInterrupt

    if remaking:
        make_tiny_assets(tmp_path, num_samples=20)
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "_write_model", be_killed)
        with pytest.raises(KeyboardInterrupt):
            make_tiny_assets(tmp_path, num_samples=21)
    make_tiny_assets(tmp_path / "fresh", num_samples=20)
    make_tiny_assets(tmp_path, num_samples=20)
    assert contents(tmp_path) == contents(tmp_path / "fresh")
    monkeypatch.setattr(tiny, "_write_model", be_killed)
    make_tiny_assets(tmp_path, num_samples=20)


@pytest.mark.usefixtures("small_library")
@pytest.mark.parametrize("num_samples", [0, 10**9])
def test_an_impossible_number_of_samples_is_refused(num_samples: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^`num_samples` must be in \[1, \d+\], but is {num_samples} inst"):
        make_tiny_assets(tmp_path, num_samples=num_samples)


@pytest.mark.usefixtures("small_library")
def test_the_command_says_where_the_assets_are_or_why_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tiny", str(tmp_path), "--num-samples", "20"])
    tiny.main()
    assert capsys.readouterr().out == f"Data, tokenizer and model are in {tmp_path}.\n"
    monkeypatch.setattr("sys.argv", ["tiny", str(tmp_path / tiny.DATA_NAME / "assets")])
    with pytest.raises(SystemExit, match=r"^`output_dir` cannot be written: folder '.*\.$"):
        tiny.main()

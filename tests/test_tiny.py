"""The tiny assets: the same bytes for the same arguments, complete or made again, and readable by torchtune."""

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training
from torchtune.modules.peft import validate_missing_and_unexpected_for_lora

from torchtune_adaptive import tiny
from torchtune_adaptive.tiny import MODEL_GEOMETRY, make_tiny_assets

REPOSITORY = Path(__file__).resolve().parents[1]
ASSETS = (tiny.DATA_NAME, tiny.PAIRS_NAME, tiny.TOKENIZER_NAME, tiny.MODEL_NAME)


@pytest.fixture(scope="session")
def whole_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The assets of the default arguments: all docstrings."""
    directory = tmp_path_factory.mktemp("whole")
    make_tiny_assets(directory)
    return directory


def load(name: str, tiny_dir: Path, output_dir: Path) -> DictConfig:
    shipped = OmegaConf.load(REPOSITORY / "configs" / "tiny" / f"{name}.yaml")
    cfg = OmegaConf.merge(shipped, {"tiny_dir": str(tiny_dir), "output_dir": str(output_dir)})
    assert isinstance(cfg, DictConfig)
    return cfg


def contents(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in ASSETS}


@pytest.mark.slow
def test_same_arguments_give_the_same_bytes(tiny_dir: Path, tmp_path: Path) -> None:
    tiny._stdlib_samples.cache_clear()
    tiny._tokenizer.cache_clear()
    make_tiny_assets(tmp_path, num_samples=400)
    assert contents(tmp_path) == contents(tiny_dir)


def test_making_assets_does_not_change_the_random_generators(tmp_path: Path) -> None:
    before = torch.get_rng_state(), random.getstate()
    make_tiny_assets(tmp_path, num_samples=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def read_samples(directory: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (directory / tiny.DATA_NAME).read_text(encoding="utf-8").splitlines()]


def test_there_are_thousands_of_distinct_samples_with_skewed_lengths(whole_dir: Path) -> None:
    samples = read_samples(whole_dir)
    assert len(samples) > 3000
    assert all(set(sample) == {"input", "output"} and sample["output"].strip() for sample in samples)
    assert len({(sample["input"], sample["output"]) for sample in samples}) == len(samples)
    lengths = sorted(len(sample["output"]) for sample in samples)
    assert statistics.fmean(lengths) > 1.2 * statistics.median(lengths)


def test_a_sample_holds_a_signature_and_its_docstring(whole_dir: Path) -> None:
    documented = {sample["input"]: sample["output"] for sample in read_samples(whole_dir)}
    docstring = documented["def Counter.most_common(self, n=None)"]
    assert docstring.startswith("List the n most common elements and their counts")
    assert "\n\n>>> Counter(" in docstring  # paragraphs and lines are kept


def test_tokenizer_round_trips_code_blank_lines_and_unknown_characters(tiny_dir: Path, tmp_path: Path) -> None:
    tokenizer = config.instantiate(load("full", tiny_dir, tmp_path).tokenizer)
    assert tokenizer.vocab_size == MODEL_GEOMETRY["vocab_size"]
    for text in ("def f(x: int = 0) -> str", "Returns:\n    the  sum\n\n\ttab", "naïve 漢字 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ["full", "lora"])
def test_dataset_of_the_config_loads_offline_and_every_sample_has_a_label_to_learn(
    name: str, tiny_dir: Path, tmp_path: Path
) -> None:
    cfg = load(name, tiny_dir, tmp_path)
    dataset = config.instantiate(cfg.dataset, config.instantiate(cfg.tokenizer))
    assert len(dataset) == 400
    lengths = [len(dataset[index]["tokens"]) for index in range(len(dataset))]
    assert max(lengths) == cfg.tokenizer.max_seq_len  # the longest are cut, most are far shorter
    assert statistics.median(lengths) < cfg.tokenizer.max_seq_len / 2
    assert all(any(label != -100 for label in dataset[index]["labels"]) for index in range(len(dataset)))


@pytest.mark.parametrize("name", ["full", "lora"])
def test_checkpoint_loads_strictly_into_the_config_s_model(name: str, tiny_dir: Path, tmp_path: Path) -> None:
    cfg = load(name, tiny_dir, tmp_path)
    assert {key: cfg.model[key] for key in MODEL_GEOMETRY} == MODEL_GEOMETRY
    model = config.instantiate(cfg.model)
    weights = config.instantiate(cfg.checkpointer).load_checkpoint()[training.MODEL_KEY]
    if name == "full":
        model.load_state_dict(weights, strict=True)
        return
    missing, unexpected = model.load_state_dict(weights, strict=False)
    validate_missing_and_unexpected_for_lora(
        cfg.model.lora_attn_modules,
        cfg.model.apply_lora_to_mlp,
        cfg.model.apply_lora_to_output,
        base_missing=missing,
        base_unexpected=unexpected,
    )


def test_complete_assets_are_kept(tmp_path: Path) -> None:
    make_tiny_assets(tmp_path, num_samples=20)
    made = [(tmp_path / name).stat().st_mtime_ns for name in ASSETS]
    make_tiny_assets(tmp_path, num_samples=20)
    assert [(tmp_path / name).stat().st_mtime_ns for name in ASSETS] == made


@pytest.mark.parametrize("killed_in", ["_write_data", "_tokenizer", "_write_model", "write_whole"])
@pytest.mark.parametrize("remaking", [False, True])
def test_assets_of_a_run_killed_half_way_or_made_with_other_arguments_are_made_again(
    killed_in: str, remaking: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    if remaking:
        make_tiny_assets(tmp_path, num_samples=20)
    with monkeypatch.context() as patch:
        patch.setattr(tiny, killed_in, be_killed)
        with pytest.raises(KeyboardInterrupt):
            make_tiny_assets(tmp_path, num_samples=21)
    for num_samples in (21, 20):
        make_tiny_assets(tmp_path, num_samples=num_samples)
        make_tiny_assets(tmp_path / "fresh", num_samples=num_samples)
        assert contents(tmp_path) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("num_samples", [0, -1, 10**9])
def test_an_impossible_number_of_samples_is_refused(num_samples: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^`num_samples` must be in \[1, \d+\], but is {num_samples} inst"):
        make_tiny_assets(tmp_path, num_samples=num_samples)


def test_a_directory_that_cannot_be_written_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("sys.argv", ["tiny", str(tmp_path / "file" / "assets")])
    with pytest.raises(SystemExit) as refused:
        tiny.main()
    assert str(refused.value).startswith("`output_dir` must be a folder that can be written, but is '")
    assert "\n" not in str(refused.value)


def test_the_command_says_where_the_assets_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tiny", str(tmp_path), "--num-samples", "20"])
    tiny.main()
    assert capsys.readouterr().out == f"Data, tokenizer and model are in {tmp_path}.\n"
    assert len(read_samples(tmp_path)) == 20

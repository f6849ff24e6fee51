"""Loaded configs equal those that torchtune passes to a recipe."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from torchtune import config

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.configs import load_config, resolve_config_argument, stock_recipes_of

OVERRIDES: dict[str, list[str]] = {
    "none": [],
    "values of every type": ["batch_size=7", "shuffle=False", "dtype=bf16", "max_steps_per_epoch=null", "seed=None"],
    "a small float": ["optimizer.lr=2e-5"],
    "a list": ["checkpointer.checkpoint_files=[a.pt,b.pt]"],
    "a new key": ["adaptive.power_of_two=False", "mine.own=1"],
    "a component by its key": ["model=torchtune.models.llama2.lora_llama2", "model.lora_rank=4"],
    "a component by its name": ["optimizer._component_=torch.optim.SGD"],
    "a removal": ["~max_steps_per_epoch", "~optimizer.fused"],
    "a removal and more": ["~optimizer.fused", "optimizer=torch.optim.SGD", "optimizer.momentum=0.9"],
    "a value that others refer to": ["output_dir=/elsewhere"],
    "leading zeros of a file's name": ["checkpointer.max_filename=00030"],
}
WITH_REFERENCES = """
base: /usual
output_dir: ${base}/out
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-5
  fused: True
model:
  _component_: torchtune.models.llama2.llama2_7b
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_files: [x.pt]
max_steps_per_epoch: 3
"""


def as_torchtune_has_it(path: Path, overrides: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    """The config that a stock recipe is called with."""
    handed: list[DictConfig] = []

    @config.parse
    def recipe_main(cfg: DictConfig) -> None:
        handed.append(cfg)

    monkeypatch.setattr(sys, "argv", ["recipe", "--config", str(path), *overrides])
    with pytest.raises(SystemExit):
        sys.exit(recipe_main())
    return handed[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(WITH_REFERENCES)
    return path


@pytest.mark.parametrize("case", list(OVERRIDES))
@pytest.mark.parametrize("of_ours", [True, False], ids=["tiny", "with references"])
def test_overrides_are_applied_as_torchtune_does(
    case: str, of_ours: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(resolve_config_argument(["--config", "tiny/full"])[1]) if of_ours else file
    loaded = load_config(str(path), OVERRIDES[case])
    expected = as_torchtune_has_it(path, OVERRIDES[case], monkeypatch)
    assert OmegaConf.to_container(loaded, resolve=True) == OmegaConf.to_container(expected, resolve=True)
    assert OmegaConf.to_container(loaded) == OmegaConf.to_container(expected)


def test_a_value_that_refers_to_another_follows_its_override(file: Path) -> None:
    cfg = load_config(str(file), ["base=/mine"])
    assert (cfg.output_dir, cfg.metric_logger.log_dir) == ("/mine/out", "/mine/out/logs")


def test_a_component_replaced_by_its_key_keeps_its_arguments() -> None:
    before = load_config("tiny/full").model
    after = load_config("tiny/full", ["model=torchtune.models.llama2.lora_llama2", "model.lora_rank=4"]).model
    changes = {"_component_": "torchtune.models.llama2.lora_llama2", "lora_rank": 4}
    assert OmegaConf.to_container(after) == {**before, **changes}


def test_a_removed_key_is_gone_and_the_rest_stays() -> None:
    before, after = load_config("tiny/full"), load_config("tiny/full", ["~model.num_layers", "~seed"])
    assert set(before) - set(after) == {"seed"}
    assert set(before.model) - set(after.model) == {"num_layers"}


@pytest.mark.parametrize("text", ["2e-5", "2E-5", "2.0e-5", "0.00002"])
def test_a_small_number_is_a_number_on_the_command_line_and_in_a_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"lr: {text}\n")
    in_file, on_line = load_config(str(tmp_path / "mine.yaml")), load_config("tiny/full", [f"optimizer.lr={text}"])
    assert (in_file.lr, on_line.optimizer.lr) == (2e-5, 2e-5)


def test_a_config_is_found_by_our_name_by_stock_name_and_by_path(file: Path) -> None:
    found = [load_config(name) for name in ("tiny/lora", "llama3_1/8B_lora", str(file))]
    assert [cfg.model._component_ for cfg in found] == [
        "torchtune.models.llama2.lora_llama2",
        "torchtune.models.llama3_1.lora_llama3_1_8b",
        "torchtune.models.llama2.llama2_7b",
    ]
    assert found[0].adaptive.strategy == "linear_extrapolation"


def test_a_stock_config_has_recipes_and_any_other_has_none(file: Path) -> None:
    assert stock_recipes_of("llama3_1/8B_lora") == ["lora_finetune_distributed"]
    assert stock_recipes_of("llama3_1/8B_full_dpo") == ["full_dpo_distributed"]
    assert [stock_recipes_of(name) for name in ("tiny/full", str(file), "no/such")] == [[], [], []]


@pytest.mark.parametrize(
    ("override", "quoted"),
    [
        ("batch_size", "'batch_size'"),
        ("a=b=c", "'a=b=c'"),
        ("~nosuchkey", "nosuchkey"),
        ("~model", "model"),
        ("~model.nosuchkey", "model.nosuchkey"),
        ("model.layers=[1, 2", "[1, 2"),
        ("adaptive=[1]", "adaptive"),
        ("--flag", "--flag"),
    ],
)
def test_an_override_that_cannot_be_applied_is_refused_and_quoted(override: str, quoted: str) -> None:
    with pytest.raises(InputError) as refusal:
        load_config("tiny/full", ["seed=1", override])
    assert quoted in str(refusal.value)
    assert "\n" not in str(refusal.value)

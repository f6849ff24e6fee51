"""Loaded configs equal those that torchtune passes to a recipe."""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from torchtune._recipe_registry import Recipe, get_all_recipes

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.checks import check_components, check_top_level_keys
from torchtune_adaptive.stock.configs import Method, flattened, load_config, method_of, resolve_config_argument

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
def test_overrides_are_applied_as_torchtune_does(case: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_config(str(file), OVERRIDES[case])
    expected = as_torchtune_has_it(file, OVERRIDES[case], monkeypatch)
    assert OmegaConf.to_container(loaded, resolve=True) == OmegaConf.to_container(expected, resolve=True)
    assert OmegaConf.to_container(loaded) == OmegaConf.to_container(expected)


def test_a_config_is_flattened_to_values_that_json_can_hold() -> None:
    nested = {"a": {"b": [1, {"c": "${seed}"}]}, "seed": 5, "none": None, "path": Path("x"), "empty": {}, 3: True}
    flat = flattened(OmegaConf.create(nested))
    expected = {"a.b.0": 1, "a.b.1.c": 5, "seed": 5, "none": None, "path": repr(Path("x")), "3": True}
    assert flat == json.loads(json.dumps(flat)) == expected


def test_a_config_is_found_by_adaptive_name_stock_name_or_path(file: Path) -> None:
    found = [load_config(name) for name in ("tiny/lora", "llama3_1/8B_lora", str(file))]
    assert [cfg.model._component_ for cfg in found] == [
        "torchtune.models.llama2.lora_llama2",
        "torchtune.models.llama3_1.lora_llama3_1_8b",
        "torchtune.models.llama2.llama2_7b",
    ]
    assert found[0].adaptive.memory_limit == "512MiB"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["key=value"], "`--config` needs the name or path of a config."),
        (
            ["--config", "no/such.yaml"],
            "`--config` must be the name or path of a config, but is 'no/such.yaml' instead.",
        ),
        (["--config", "llama3_1/8b_ful"], "but is 'llama3_1/8b_ful' instead; did you mean `llama3_1/8B_full`?"),
        (["--config", "BROKEN"], " is not a YAML file: "),
        (["--config", "LIST"], "must be a YAML mapping, but"),
        (
            ["--config", "tiny/full", "batch_size"],
            "An override must have the form key=value, but is 'batch_size' instead.",
        ),
        (["--config", "tiny/full", "~model.nosuchkey"], "model.nosuchkey"),
        (["--config", "tiny/full", "adaptive=[1]"], "adaptive"),
        (["--config", "tiny/full", "a=b=c"], "must have the form key=value, but is 'a=b=c' instead."),
        (["--config", "NUMBER"], "keys must be words"),
        (["--config", "tiny/full", "--seed=1"], "must have the form key=value, but is '--seed=1' instead."),
        (["--config", "tiny/full", "~model"], "Overrides '~model' do not fit the config:"),
        (["--config", "tiny/full", "model.layers=[1, 2"], "Overrides 'model.layers=[1, 2' do not fit the config:"),
        (["--config", "tiny/full", "seed=${nosuch}"], "The config is not complete: Interpolation"),
        (["--config", "TWICE"], "found duplicate key"),
        (["--config", "a\0b"], "`--config` 'a\\x00b' is not a YAML file: ValueError: embedded null byte."),
        (["--config", "a" * 5000], "File name too long"),
        (["--config", "DEEP"], "RecursionError"),
    ],
)
def test_a_command_line_that_names_no_config_is_refused(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: [1, 2\nb: }")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    (tmp_path / "twice.yaml").write_text("a: 1\na: 2\n")
    (tmp_path / "number.yaml").write_text("1: 2\n")
    (tmp_path / "deep.yaml").write_text("[" * 700)
    files = {name.upper(): str(tmp_path / f"{name}.yaml") for name in ("broken", "list", "twice", "deep", "number")}
    with pytest.raises(InputError) as refusal:
        resolve_config_argument([files.get(argument, argument) for argument in arguments])
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_help_is_left_to_torchtunes_parser() -> None:
    assert resolve_config_argument(["--config", "tiny/full", "--help"])[2] == "--help"


# ---- the method that a config is for

METHODS: tuple[Method, ...] = get_args(Method)
LORA = {"_component_": "torchtune.models.llama2.lora_llama2", "lora_attn_modules": ["q_proj"]}
DPO = {"_component_": "torchtune.rlhf.loss.DPOLoss"}


def config_with(**blocks: Any) -> DictConfig:
    """A minimal config of full finetuning, with ``blocks`` instead of its own; None removes one."""
    plain = {"model": {"_component_": "torchtune.models.llama2.llama2"}, "optimizer": {"lr": 1.0}, "loss": {}}
    return OmegaConf.create({key: block for key, block in (plain | blocks).items() if block is not None})


def recipes_of_method(method: Method) -> list[Recipe]:
    return [one for one in get_all_recipes() if one.name in (f"{method}_distributed", f"{method}_single_device")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The import path:DeprecationWarning")  # torchtune's, of its own phi4
@pytest.mark.parametrize("method", METHODS)
def test_every_stock_config_is_of_the_method_of_its_recipe_and_its_keys_and_values_pass(method: Method) -> None:
    importlib.import_module("tests.support.images")  # which finds torchvision
    configs = {config.name: load_config(config.name) for one in recipes_of_method(method) for config in one.configs}
    assert configs
    assert {name: method_of(cfg) for name, cfg in configs.items()} == dict.fromkeys(configs, method)
    for cfg in configs.values():
        check_top_level_keys(cfg)
        check_components(cfg)


def test_dpo_with_another_loss_and_keys_that_are_null_are_recognised() -> None:
    rso = {"_component_": "torchtune.rlhf.loss.RSOLoss"}
    assert method_of(config_with(loss=rso, model=LORA, ref_checkpointer={})) == "lora_dpo"
    nothing = OmegaConf.create({"teacher_model": None, "quantizer": None, "early_exit_loss": None})
    assert method_of(DictConfig(config_with() | nothing)) == "full_finetune"


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        (
            {"loss": {"_component_": "torchtune.dev.grpo.loss.GRPOLoss"}},
            "`loss` must be one of finetuning, distillation or DPO, but is 'torchtune.dev.grpo.loss.GRPOLoss' instead.",
        ),
        (
            {"layer_dropout": {"prob": 0.2}},
            "No adaptive recipe supports early exits: `layer_dropout` is {'prob': 0.2}.",
        ),
        ({"optimizer": None}, "The config has no `optimizer`, which training needs."),
        ({"teacher_model": {}}, "A `teacher_model` needs a LoRA `model`, not 'torchtune.models.llama2.llama2'."),
        ({"loss": DPO}, "DPO without LoRA needs a `ref_checkpointer`."),
    ],
    ids=["GRPO", "early exit", "no training", "full distillation", "DPO without a reference"],
)
def test_a_config_that_no_adaptive_recipe_can_train_is_refused(blocks: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refusal:
        method_of(config_with(**blocks))
    assert str(refusal.value) == sentence

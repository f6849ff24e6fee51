"""The ready configs: written by their generator, accepted by all their readers, and planned as their headers say."""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig, ListConfig
from torchtune._recipe_registry import get_all_recipes
from torchtune.training.checkpointing._utils import FormattedCheckpointFiles

from benchmarks.config_plans import planned
from scripts.config_table import CONFIGS, FOLDER, MODELS, RECIPES, Config, all_configs
from scripts.make_configs import DEVICES_GIB, GIB, PLANS, config_text, digest, written_files
from torchtune_adaptive.plan.worker import trace_config
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import load_config, method_of, resolved
from torchtune_adaptive.stock.options import check_options

READY = {config.full_name: config for config in all_configs()}
SMALL = "adaptive/qwen2_5/0.5B_full_single_device"


def plan_of(name: str) -> dict[str, Any]:
    return json.loads(PLANS.read_text())["configs"][name]


def components(cfg: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every component of a config with its arguments."""
    for value in cfg.values() if isinstance(cfg, dict) else ():
        if isinstance(value, dict) and "_component_" in value:
            yield value["_component_"], {key: one for key, one in value.items() if key != "_component_"}
        yield from components(value)


def checkpoint_files(checkpointer: DictConfig) -> list[str]:
    files = checkpointer.checkpoint_files
    if isinstance(files, ListConfig):
        return [str(file) for file in files]
    return FormattedCheckpointFiles.from_dict(dict(files)).build_checkpoint_filenames()


def model_name(component: str) -> str:
    """
    >>> model_name("torchtune.models.llama3_1.qlora_llama3_1_8b")
    'llama3_1_8b'
    """
    return re.sub("^q?lora_", "", component.rpartition(".")[2])


def test_the_committed_configs_are_those_that_the_generator_writes() -> None:
    written = written_files()
    assert set(written) - {CONFIGS / "README.md"} == set((CONFIGS / FOLDER).rglob("*.yaml"))
    assert [path for path, text in written.items() if path.read_text(encoding="utf-8") != text] == []


def test_a_plan_of_another_config_is_not_shown() -> None:
    config = READY[SMALL]
    assert "24 GiB" in config_text(config, plan_of(config.full_name))
    assert "Not planned yet." in config_text(config, None)
    assert digest(config) != digest(READY["adaptive/llama3_2/1B_lora_single_device"])


def test_no_name_equals_one_of_torchtunes() -> None:
    stock = {config.name for recipe in get_all_recipes() for config in recipe.configs}
    ours = {path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")}
    assert ours & stock == set()
    assert ours > READY.keys()


@pytest.mark.filterwarnings("ignore:The import path 'torchtune.modules.tokenizers':DeprecationWarning")  # by phi4
@pytest.mark.parametrize("config", READY.values(), ids=READY)
def test_a_config_is_accepted_by_all_its_readers(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    if config.needs_bitsandbytes:
        monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    cfg = load_config(config.full_name)
    settings = AdaptiveSettings.from_cfg(cfg)
    check_options(cfg, settings, ranks=config.ranks)
    assert method_of(cfg) == RECIPES[config.method]
    assert settings.global_batch_size is not None
    assert settings.global_batch_size % config.ranks == 0
    assert cfg.tokenizer.max_seq_len == config.row_tokens
    for component, arguments in components(resolved(cfg)):
        module, _, name = component.rpartition(".")
        if module != "bitsandbytes.optim":
            inspect.signature(getattr(import_module(module), name)).bind_partial(**arguments)


def test_model_and_checkpoint_files_are_those_of_torchtunes_config_of_the_same_name() -> None:
    known = {config.name for recipe in get_all_recipes() for config in recipe.configs}
    one_of_each = {config.model.title: config.name for config in reversed(READY.values()) if config.name in known}
    assert one_of_each.keys() == {model.title for model in MODELS.values()}
    for name in one_of_each.values():
        ours, theirs = load_config(f"{FOLDER}/{name}"), load_config(name)
        assert checkpoint_files(ours.checkpointer) == checkpoint_files(theirs.checkpointer), name
        for key in ("_component_", "model_type"):
            assert ours.checkpointer[key] == theirs.checkpointer[key], name
        assert model_name(ours.model._component_) == model_name(theirs.model._component_), name
        assert ours.tokenizer._component_ == theirs.tokenizer._component_, name


@pytest.mark.parametrize("name", ["llama3_1/8B_full_dpo", "llama3_2/8B_to_1B_KD_lora_single_device"])
def test_the_other_models_of_a_method_are_those_of_torchtunes_config(name: str) -> None:
    ours, theirs = load_config(f"{FOLDER}/{name}"), load_config(name)
    (key,) = {"ref_checkpointer", "teacher_checkpointer"} & {str(key) for key in theirs}
    assert checkpoint_files(ours[key]) == checkpoint_files(theirs[key])
    assert ours.get("teacher_model") == theirs.get("teacher_model")


@pytest.mark.parametrize("config", READY.values(), ids=READY)
def test_a_header_has_the_figures_of_the_plan(config: Config) -> None:
    header = config.path.read_text(encoding="utf-8").split("\n\n")[0]
    plan = plan_of(config.full_name)
    for size_gib in DEVICES_GIB:
        (line,) = re.findall(rf"^# +{size_gib} GiB +(.*)$", header, re.M)
        found = plan["gpus"][f"{size_gib}GiB"]
        sizes = [str(found[key]) for key in ("largest_batch_size", "certain_batch_size", "batch_size")]
        expected = ["none", "-", "-"] if found["largest_batch_size"] == 0 else sizes
        assert line.split() == [*expected, f"{found['process_bytes'] / GIB:.1f}", "GiB"]
    assert f"{config.row_tokens} tokens" in header


@pytest.mark.filterwarnings("ignore")  # as in the process that usually traces
def test_a_small_config_is_planned_as_it_says() -> None:
    now, kept = planned(READY[SMALL], traced_by=trace_config), plan_of(SMALL)
    assert {key: kept[key] for key in now} == now


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", READY.values(), ids=READY)
def test_every_config_is_planned_as_it_says(config: Config) -> None:
    now, kept = planned(config), plan_of(config.full_name)
    assert {key: kept[key] for key in now} == now


def test_every_config_fits_the_largest_gpu_that_its_header_names() -> None:
    plans = json.loads(PLANS.read_text())["configs"]
    assert plans.keys() == READY.keys()
    assert [name for name, plan in plans.items() if plan["gpus"]["80GiB"]["largest_batch_size"] == 0] == []

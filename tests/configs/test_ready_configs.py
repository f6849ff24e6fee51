"""Each shipped config is accepted by all its readers, has components that take its arguments, and can be planned."""

import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, ListConfig
from torchtune import config
from torchtune._recipe_registry import get_all_recipes
from torchtune.training.checkpointing._utils import FormattedCheckpointFiles

from torchtune_adaptive.plan.replay import exact
from torchtune_adaptive.plan.trace.config_steps import steps_of
from torchtune_adaptive.stock.checks import check_components, check_config
from torchtune_adaptive.stock.configs import load_config, method_of, resolved
from torchtune_adaptive.stock.installed import config_files, recipe_files

PATHS = config_files()
STOCK = {one.name for recipe in get_all_recipes() for one in recipe.configs}
each = pytest.mark.parametrize("name", sorted(PATHS))
PLANNED = "adaptive/llama3_1/8B_lora_dpo"  # tests/plan/test_plan_methods.py: each method


def ranks_of(path: Path) -> int:
    """Ranks of the launch in the config's first lines."""
    found = re.search(r"--nproc_per_node (\d+) adaptive_", path.read_text())
    return int(found[1]) if found else 1


@each
def test_a_config_is_accepted_and_belongs_to_the_recipe_that_it_names(name: str) -> None:
    cfg = load_config(name)
    settings = check_config(cfg, ranks=ranks_of(PATHS[name]))
    assert settings.searches == (not name.startswith("tiny/"))
    assert (settings.global_batch_size or 0) % ranks_of(PATHS[name]) == 0
    (recipe,) = recipe_files().keys() & set(re.findall(r"\badaptive_\w+", PATHS[name].read_text()))
    assert re.fullmatch(f"adaptive_{method_of(cfg)}_(distributed|single_device)", recipe)
    assert f"{recipe} --config {name}\n" in PATHS[name].read_text()
    check_components(cfg)
    config.validate(DictConfig(resolved(cfg)))


@pytest.fixture
def shallow_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llamas of one layer, for a quick trace."""
    for family in ("llama3_1", "llama3_2"):
        builders: Any = import_module(f"torchtune.models.{family}._model_builders")
        for builder in (family, f"lora_{family}"):
            shallow = partial(_with_one_layer, getattr(builders, builder))
            monkeypatch.setattr(builders, builder, shallow)


def _with_one_layer(build: Any, **arguments: Any) -> Any:
    return build(**arguments | {"num_layers": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == PLANNED else pytest.param(name, marks=pytest.mark.exhaustive) for name in sorted(PATHS)]
)
def test_a_config_can_be_planned(name: str, shallow_models: None) -> None:
    cfg = DictConfig(resolved(load_config(name)))
    with steps_of(cfg, world_size=ranks_of(PATHS[name])) as steps:
        assert exact(steps.events(steps.num_layers, 2, 64)).allocated_bytes > 0


def checkpoint_files(checkpointer: DictConfig) -> list[str]:
    files = checkpointer.checkpoint_files
    if isinstance(files, ListConfig):
        return [str(file) for file in files]
    return FormattedCheckpointFiles.from_dict(dict(files)).build_checkpoint_filenames()


@pytest.mark.parametrize("name", sorted(name for name in PATHS if name.removeprefix("adaptive/") in STOCK))
def test_models_and_files_are_those_of_torchtunes_config(name: str) -> None:
    ours, theirs = load_config(name), load_config(name.removeprefix("adaptive/"))
    for key in ("model", "teacher_model", "tokenizer"):
        assert (ours.get(key) or {}).get("_component_") == (theirs.get(key) or {}).get("_component_")
    for key in ("checkpointer", "ref_checkpointer", "teacher_checkpointer"):
        if key in theirs:
            assert ours[key]._component_ == theirs[key]._component_
            assert checkpoint_files(ours[key]) == checkpoint_files(theirs[key])

"""The package is typed, its modules are importable as the wheel maps them, and no config has an unknown key."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from scripts.make_configs import adaptive_block
from torchtune_adaptive.settings import AdaptiveSettings

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))
FOR_THE_CPU = [path for path in CONFIGS if path.parent.name == "tiny"]


def _name(path: Path) -> str:
    return path.relative_to(REPOSITORY / "configs").with_suffix("").as_posix()


def load(path: Path) -> DictConfig:
    cfg = OmegaConf.load(path)
    assert isinstance(cfg, DictConfig)
    return cfg


def test_no_file_is_tracked_that_a_run_wrote() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git repository")
    paths = {Path(line) for line in listed.stdout.splitlines()}
    assert {path for path in paths if path.suffix in {".zip", ".pt", ".pickle", ".safetensors", ".gz", ".whl"}} == set()


def test_the_package_is_typed() -> None:
    spec = importlib.util.find_spec("torchtune_adaptive")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    assert any((Path(location) / "py.typed").is_file() for location in spec.submodule_search_locations)


@pytest.mark.parametrize("recipe", sorted((REPOSITORY / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_is_a_top_level_module(recipe: Path) -> None:
    spec = importlib.util.find_spec(recipe.stem)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == recipe


@pytest.mark.parametrize("path", CONFIGS, ids=_name)
def test_a_shipped_config_has_every_key_with_its_description_and_no_unknown_key(path: Path) -> None:
    cfg = load(path)
    settings = AdaptiveSettings.from_cfg(cfg)  # refuses unknown keys
    values = {**cfg.adaptive, "use_maximum_batch_size": cfg.use_maximum_batch_size}
    assert adaptive_block(values) in path.read_text(encoding="utf-8")
    assert cfg.batch_increase_function is None
    assert settings.searches == (path not in FOR_THE_CPU)


@pytest.mark.parametrize("path", CONFIGS, ids=_name)
def test_the_header_of_a_config_names_its_recipe_and_itself(path: Path) -> None:
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    name = _name(path)
    (recipe,) = set(re.findall(r"\badaptive_\w+", header))
    assert (REPOSITORY / "recipes" / f"{recipe}.py").exists()
    assert f"{recipe} --config {name}" in header
    assert "This config assumes" in header
    assert "To launch" in header


@pytest.mark.parametrize("path", FOR_THE_CPU, ids=_name)
def test_adding_one_override_to_a_config_for_the_cpu_is_enough_to_search(path: Path) -> None:
    cfg = load(path)
    settings = AdaptiveSettings.from_cfg(DictConfig({**cfg, "use_maximum_batch_size": True}))
    assert settings.searches
    assert settings.memory_limit_bytes is not None

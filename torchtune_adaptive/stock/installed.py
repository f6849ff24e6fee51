"""Files of the installed torchtune, found without importing it, which takes seconds."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def module_from_file(name: str, path: Path) -> ModuleType:
    """Load the file at ``path`` as a module called ``name``."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe_dir() -> Path:
    """The folder of the stock recipes."""
    return _package_dir().parent / "recipes"


def stock_recipe_names() -> list[str]:
    """The recipes that ``tune`` knows."""
    return [recipe.name for recipe in _registered_recipes()]


def stock_recipe_files() -> dict[str, list[Path]]:
    """The file of each recipe that ``tune`` knows, and those of its configs, by the recipe's name.

    Files that torchtune lists but does not have are left out.
    """
    files = {
        recipe.name: [recipe.file_path, *(f"configs/{config.file_path}" for config in recipe.configs)]
        for recipe in _registered_recipes()
    }
    return {name: [path for one in listed if (path := recipe_dir() / one).is_file()] for name, listed in files.items()}


def stock_config_path(name: str) -> Path | None:
    """The stock config that ``tune`` knows as ``name``; None if there is none."""
    file_path = _registered_configs().get(name)
    return None if file_path is None else recipe_dir() / "configs" / file_path


@cache
def _registered_configs() -> dict[str, str]:
    """Paths of configs relative to their folder, by name."""
    return {config.name: config.file_path for recipe in _registered_recipes() for config in recipe.configs}


@cache
def _registered_recipes() -> list[Any]:
    registry: Any = module_from_file("_registry_of_torchtune", _package_dir() / "_recipe_registry.py")
    return registry.get_all_recipes()


def _package_dir() -> Path:
    spec = importlib.util.find_spec("torchtune")
    assert spec is not None, "torchtune is a requirement of this package"
    assert spec.origin is not None, spec
    return Path(spec.origin).parent

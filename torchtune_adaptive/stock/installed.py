"""torchtune's recipes and configs and ours: names and files. torchtune, whose import takes seconds, is not imported."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtune_adaptive.errors import InputError


def require_torchtune() -> None:
    """Check that what recipes and the program need beside torch is installed.

    Raises:
        InputError: it is not.
    """
    missing = [name for name in ("torchtune", "torchao", "omegaconf") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"Not installed: {', '.join(missing)}; `pip install 'torchtune-adaptive[torchtune]'` adds what is missing."
        )


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


@cache
def stock_recipe_files() -> dict[str, list[Path]]:
    """The file of each recipe that ``tune`` knows, and those of its configs, by the recipe's name.

    Files that torchtune lists but does not have are left out.
    """
    files = {
        recipe.name: [recipe.file_path, *(f"configs/{config.file_path}" for config in recipe.configs)]
        for recipe in _registered_recipes()
    }
    return {name: [path for one in listed if (path := recipe_dir() / one).is_file()] for name, listed in files.items()}


@cache
def stock_config_files() -> dict[str, Path]:
    """The file of each config that ``tune`` knows, by its name."""
    directory = recipe_dir() / "configs"
    return {config.name: directory / config.file_path for recipe in _registered_recipes() for config in recipe.configs}


def adaptive_name(stock_recipe: str) -> str:
    """The name of our recipe that extends the stock recipe of that name.

    >>> adaptive_name("full_finetune_distributed")
    'adaptive_full_finetune_distributed'
    """
    return f"adaptive_{stock_recipe}"


@cache
def recipe_files() -> dict[str, Path]:
    """Files of our recipes by name, in the order of the stock recipes that they extend."""
    names = [adaptive_name(name) for name in stock_recipe_files() if "/" not in name]  # a module's name has none
    specs = {name: importlib.util.find_spec(name) for name in names}
    return {name: Path(spec.origin) for name, spec in specs.items() if spec is not None and spec.origin is not None}


def config_dir() -> Path:
    """Where our configs lie: in the package where it is installed, beside it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def config_files() -> dict[str, Path]:
    """Files of our configs by name."""
    directory = config_dir()
    return {path.relative_to(directory).with_suffix("").as_posix(): path for path in sorted(directory.rglob("*.yaml"))}


@cache
def _registered_recipes() -> list[Any]:
    registry: Any = module_from_file("_registry_of_torchtune", _package_dir() / "_recipe_registry.py")
    return registry.get_all_recipes()


def _package_dir() -> Path:
    spec = importlib.util.find_spec("torchtune")
    assert spec is not None, "see `require_torchtune`"
    assert spec.origin is not None, spec
    return Path(spec.origin).parent

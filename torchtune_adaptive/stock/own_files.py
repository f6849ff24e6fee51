"""Our recipes and configs beside the stock ones: their names, files, and which config is for which recipe."""

import importlib.util
import re
from functools import cache
from pathlib import Path

from torchtune_adaptive.stock.installed import stock_recipe_names

_PREFIX = "adaptive_"


def adaptive_name(stock_recipe: str) -> str:
    """The name of our recipe that extends the stock recipe of that name.

    >>> adaptive_name("full_finetune_distributed")
    'adaptive_full_finetune_distributed'
    """
    return f"{_PREFIX}{stock_recipe}"


@cache
def recipe_files() -> dict[str, Path]:
    """Files of our recipes by name, in the order of the stock recipes that they extend."""
    names = [adaptive_name(name) for name in stock_recipe_names() if "/" not in name]  # a module's name has none
    specs = {name: importlib.util.find_spec(name) for name in names}
    return {name: Path(spec.origin) for name, spec in specs.items() if spec is not None and spec.origin is not None}


def config_dir() -> Path:
    """Where our configs lie: in the package where it is installed, beside it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def configs_by_recipe() -> dict[str, dict[str, Path]]:
    """Our configs, by name, of each of our recipes: those whose first comment names the recipe."""
    directory = config_dir()
    files = {path.relative_to(directory).with_suffix("").as_posix(): path for path in sorted(directory.rglob("*.yaml"))}
    named = {name: set(re.findall(rf"\b{_PREFIX}\w+", _first_comment(path))) for name, path in files.items()}
    return {recipe: {name: path for name, path in files.items() if recipe in named[name]} for recipe in recipe_files()}


def _first_comment(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n\n")[0]

"""Top-level keys of configs: those that recipes read, and misspelt ones."""

import difflib
import re
from functools import cache

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.settings import CONFIG_KEYS, unread_key
from torchtune_adaptive.stock.installed import stock_recipe_files
from torchtune_adaptive.stock.own_files import adaptive_name, recipe_files

# In a YAML file, a line that begins with a word and a colon; in a recipe, `cfg.seed` and `cfg.get("seed")`.
_KEY = re.compile(r"""^(\w+):|\bcfg\.(?!get\b)(\w+)|\bcfg\.get\(\s*["'](\w+)""", re.MULTILINE)
_INTERPOLATED = re.compile(r"\$\{\.*([^.:}\[\s]+)")
_ALIKE = 0.85  # difflib's ratio: one letter more, less or different in a word of five; most other words are far below


def check_top_level_keys(cfg: DictConfig) -> None:
    """Refuse a top-level key that is almost one that an adaptive recipe reads. torchtune would ignore it.

    A key that the config itself interpolates is the user's own. ``cfg`` must have its interpolations unresolved.

    Raises:
        InputError: a key resembles a known one.
    """
    ours = {key.path.partition(".")[0] for key in CONFIG_KEYS}
    unknown = [key for key in map(str, cfg) if key not in ours | _stock_keys().keys()]
    interpolated = set(_INTERPOLATED.findall(OmegaConf.to_yaml(cfg))) if unknown else set()
    read = [*ours, *(key for key, is_read in _stock_keys().items() if is_read)]
    for key in unknown:
        nearest = difflib.get_close_matches(key.lower().replace("-", "_"), read, n=1, cutoff=_ALIKE)
        if nearest and key not in interpolated:
            raise unread_key(key, meant=nearest[0])


@cache
def _stock_keys() -> dict[str, bool]:
    """Each top-level key of torchtune's recipes and configs, and whether it is one of a recipe that ours extend."""
    keys: dict[str, bool] = {}
    for recipe, paths in stock_recipe_files().items():
        is_extended = adaptive_name(recipe) in recipe_files()
        for path in paths:
            for words in _KEY.findall(path.read_text(encoding="utf-8")):
                key = "".join(words)  # one of the pattern's groups
                keys[key] = keys.get(key, False) or is_extended
    return keys

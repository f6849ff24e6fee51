"""``found.yaml``: the config of a search with the sizes that it found, ready for `tune run`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import RunEnded
from torchtune_adaptive.files import write_atomically, writing
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.sizes import Sizes

FOUND_NAME = "found.yaml"


def found_values(settings: AdaptiveSettings, sizes: Sizes, *, rows: int) -> dict[str, Any]:
    """What a search found, as values of a config's keys.

    Args:
        rows: the rows of a micro-step, before memory limits them.
    """
    values: dict[str, Any] = {}
    if sizes.token_budget is not None and not isinstance(settings.max_tokens_per_micro_batch, int):
        values["adaptive.max_tokens_per_micro_batch"] = sizes.token_budget
    if settings.use_maximum_batch_size and settings.global_batch_size is None:
        values["batch_size"] = sizes.fitting_rows
    elif settings.use_maximum_batch_size and sizes.token_budget is None:
        values["batch_size"] = sizes.limit(rows).size
    if settings.objective == "speed":
        values["adaptive.objective"] = "memory"
    return values


def found_path(cfg: DictConfig) -> Path:
    """Where a search with ``cfg`` writes the config with the sizes found."""
    return Path(cfg.output_dir) / FOUND_NAME


def end_search(cfg: DictConfig, values: Mapping[str, Any], *, seq_len: int | None, consensus: Consensus) -> NoReturn:
    """Write ``cfg`` with ``values`` to its output directory on rank 0, and end the run. A collective.

    Keys that interpolate one of the ``values``, such as a `global_batch_size` of `${batch_size}`, keep theirs.

    Args:
        seq_len: tokens of the rows that the search used; None if an earlier part of the run has found the sizes.

    Raises:
        RunEnded: it is written.
        InputError: it cannot be written.
    """
    path = found_path(cfg)
    found = ", ".join(f"{key} {value}" for key, value in values.items())
    rows = "" if seq_len is None else f"rows of {seq_len} tokens, "
    rests_on = f"{rows}{consensus.world_size} {'ranks' if consensus.world_size > 1 else 'rank'}"

    changed = cfg.copy()  # interpolations of other keys stay as they are
    OmegaConf.set_struct(changed, False)
    for key, value in {"use_maximum_batch_size": False, **values}.items():
        OmegaConf.update(changed, key, value)
    _keep_interpolated(changed, cfg)
    (changed.get("adaptive") or {}).pop("search_only", None)

    def write() -> None:
        header = f"# The sizes that a search found ({rests_on}): {found}\n"
        with writing("output_dir", path.parent, kind="folder"):
            write_atomically(path, header + OmegaConf.to_yaml(changed))

    consensus.ask_rank_zero(write)
    raise RunEnded(f"the search found {found} ({rests_on}); the config with it is {path}.", 0)


def _keep_interpolated(changed: Any, before: Any) -> None:
    """Set interpolations in ``changed``, a config or a list in one, that differ from ``before`` to its values."""
    keys: Any = changed if isinstance(changed, DictConfig) else range(len(changed))
    for key in keys:
        if OmegaConf.is_interpolation(changed, key):
            if changed[key] != before[key]:
                changed[key] = before[key]
        elif OmegaConf.is_config(changed[key]) and (isinstance(changed, ListConfig) or key in before):
            _keep_interpolated(changed[key], before[key])

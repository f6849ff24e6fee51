"""``tune-adaptive validate``: check a config, and print it with its overrides and interpolations resolved."""

import argparse
import os
import sys

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.cli.arguments import Commands, add_command
from torchtune_adaptive.errors import InputError, quote, reason_of
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.checks import check_config
from torchtune_adaptive.stock.configs import is_ppo, load_config, method_of, resolved
from torchtune_adaptive.stock.installed import adaptive_name, recipe_files


def add_validate(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "validate",
        "check a config, and print it resolved",
        "validate tiny/full",
        "validate my_config.yaml use_maximum_batch_size=True batch_size=4",
        description="Check a config as torchtune does, and our keys. Print it resolved, as YAML.",
    )
    command.add_argument("config", help="name or path of a config")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="as for `run`")
    command.set_defaults(run=_validate)


def _validate(arguments: argparse.Namespace) -> None:
    given = load_config(arguments.config, arguments.overrides)
    cfg = DictConfig(resolved(given))
    sys.path.append(os.getcwd())  # where a config's components may be, as for `run`
    settings = check_config(given, ranks=1)
    recipes = _recipes_for(cfg, settings)  # refuses first, for it is quick
    _check_components(cfg)
    print(f"# Config is well-formed. {recipes}")
    print(OmegaConf.to_yaml(cfg), end="")


def _recipes_for(cfg: DictConfig, settings: AdaptiveSettings) -> str:
    """The adaptive recipes that can train with ``cfg``, as a comment. Without adaptive keys there may be none.

    Raises:
        InputError: there is none, but there are adaptive keys.
    """
    if is_ppo(cfg):
        method = "ppo_full_finetune"
    else:
        try:
            method = method_of(cfg)
        except InputError as refusal:
            if settings != AdaptiveSettings():
                raise
            return f"No adaptive recipe can train with it: {refusal}"
    names = [adaptive_name(f"{method}_{kind}") for kind in ("distributed", "single_device")]
    return f"Adaptive recipes for it: {', '.join(name for name in names if name in recipe_files())}."


def _check_components(cfg: DictConfig) -> None:
    """Check that torchtune finds the components, and that they take their arguments.

    Raises:
        InputError: there is none of that name, or it takes no such argument.
    """
    from torchtune import config  # takes seconds
    from torchtune.config._errors import ConfigError, InstantiationError

    from torchtune_adaptive.stock.checks import check_components

    for name, block in cfg.items():
        component = block.get("_component_", "") if isinstance(block, DictConfig) else ""
        if not isinstance(component, str):
            raise InputError(f"`{name}._component_` must be a dotted name, but is {quote(component)} instead.")
    check_components(cfg)
    try:
        config.validate(cfg)
        return
    except ConfigError as found:
        reasons = [str(error) for error in found.errors]
    except InstantiationError as error:
        reasons = [" ".join(str(error).splitlines()[:2])]  # the third asks whether it is installed
    except (TypeError, ValueError) as error:  # of arguments, or of a name with an empty part
        reasons = [reason_of(error)]
    listed = "; ".join(" ".join(reason.split()).rstrip(".") for reason in reasons)
    raise InputError(f"The config must be well-formed, but is not: {listed}.")

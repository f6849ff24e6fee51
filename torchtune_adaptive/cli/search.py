"""``tune-adaptive search``: a run that ends after its search, and the command that trains with the size found."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from torchtune_adaptive.cli.arguments import PROGRAM, Commands, add_command
from torchtune_adaptive.errors import InputError, did_you_mean, quote, require_integer
from torchtune_adaptive.files import check_writable, writing
from torchtune_adaptive.launch import require_one_rank
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.checks import check_config
from torchtune_adaptive.stock.configs import config_of, resolved
from torchtune_adaptive.stock.installed import recipe_files, stock_recipe_files

_HELP = """Find the largest batch size that fits, and end.

OUTPUT_DIR/found.yaml is the config with the sizes found. The last line of the output is the command
that trains with it. No checkpoint is written. TORCHRUN-OPTIONS are those of `tune run`.

The sizes hold as long as row length, model, ranks, GPU and all else that memory depends on stay."""


def add_search(commands: Commands) -> None:
    """Add the command for its help. ``run_search`` reads its arguments."""
    add_command(
        commands,
        "search",
        "find the largest batch size that fits, and end",
        "search --nproc_per_node 2 adaptive_full_finetune_distributed --config tiny/full",
        "search adaptive_lora_finetune_single_device --config llama3_2/1B_lora_single_device",
        "search --nproc_per_node 8 adaptive_lora_finetune_distributed --config llama3_1/8B_lora"
        " tokenizer.max_seq_len=4096 adaptive.max_tokens_per_micro_batch=auto",
        usage=f"{PROGRAM} search [TORCHRUN-OPTIONS] RECIPE --config CONFIG [key=value ...]",
        description=_HELP,
    )


def run_search(arguments: Sequence[str]) -> None:
    """Search as ``arguments`` say, and print the command that trains with what was found.

    Raises:
        InputError: a value is refused.
        SystemExit: the search or the command line has ended the program.
    """
    torchrun_options, recipe, recipe_args = recipe_in(arguments)
    check_recipe(recipe)
    if torchrun_options:
        launch_of(torchrun_options, recipe)
    keys, cfg = _as_search(recipe_args)
    path = cleared_found_path(cfg)
    _tune_run([*torchrun_options, recipe, *recipe_args, *keys])
    if path.is_file():  # on the machine of rank 0
        print_command(torchrun_options, recipe, path)


def recipe_in(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """The options of torchrun, the recipe, and its arguments.

    Raises:
        InputError: there is no recipe, or no config, or an override comes before it.
    """
    if "--config" not in arguments[1:]:
        raise InputError("A search needs a recipe, followed by `--config` and the name or path of a config.")
    place = arguments.index("--config", 1) - 1
    if "=" in arguments[place]:
        raise InputError(f"Overrides come after `--config` and its config: {quote(arguments[place])} comes before.")
    return list(arguments[:place]), arguments[place], list(arguments[place + 1 :])


def check_recipe(recipe: str) -> None:
    """Refuse what `tune run` cannot run, and a recipe of torchtune's, which would train instead of searching."""
    if recipe in recipe_files():
        return
    name = recipe.removesuffix(".py")
    if name in stock_recipe_files() or recipe.startswith((".", "/")) or not Path(f"{name}.py").is_file():
        hint = did_you_mean(name, {own: own for own in recipe_files()})
        raise InputError(f"A search needs an adaptive recipe, or a copy as in my_recipe.py, not {quote(recipe)}{hint}")


def launch_of(torchrun_options: Sequence[str], recipe: str) -> argparse.Namespace:
    """The options of torchrun as it reads them, with the number of ranks of a machine as ``nproc_per_node``.

    Raises:
        InputError: this number is not known, or too many for the recipe.
    """
    from torch.distributed.run import determine_local_world_size, get_args_parser  # takes seconds

    options = get_args_parser().parse_args([*torchrun_options, recipe])
    try:
        ranks = determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise InputError(f"`--nproc_per_node` {quote(options.nproc_per_node)} is no number of ranks here.") from error
    options.nproc_per_node = require_integer("--nproc_per_node", ranks, minimum=1)
    if recipe.removesuffix(".py").endswith("_single_device"):
        require_one_rank(ranks)
    return options


def _as_search(recipe_args: Sequence[str]) -> tuple[list[str], DictConfig]:
    """The overrides that make a run of the recipe a search alone, and the config with them.

    Raises:
        InputError: the config is refused, or what its search finds cannot be put in a config.
    """
    keys = ["adaptive.search_only=True"]
    if not AdaptiveSettings.from_cfg(config_in(recipe_args)).searches:
        keys.insert(0, "use_maximum_batch_size=True")
    cfg = config_in([*recipe_args, *keys])
    check_config(cfg, ranks=1)
    return keys, DictConfig(resolved(cfg))


def config_in(recipe_args: Sequence[str]) -> DictConfig:
    """The config that a recipe's arguments name."""
    cfg = config_of(recipe_args)
    assert cfg is not None, "the program answers --help"
    return cfg


def cleared_found_path(cfg: DictConfig) -> Path:
    """Remove the config that an earlier search has left, and return where this one will leave its own.

    Raises:
        InputError: it could not be written.
    """
    from torchtune_adaptive.training.found_config import found_path  # needs torch

    if "output_dir" not in cfg:
        raise InputError("A search needs an `output_dir`.")
    path = found_path(cfg)
    with writing("output_dir", path.parent, kind="folder"):
        check_writable(path)
        path.unlink(missing_ok=True)
    return path


def print_command(torchrun_options: Sequence[str], recipe: str, path: Path) -> None:
    """Print the command that trains with the config at ``path``."""
    command = shlex.join(["tune", "run", *torchrun_options, recipe, "--config", str(path)])
    print(f"To train with what was found:\n{command}", flush=True)


def _tune_run(arguments: list[str]) -> None:
    """Run the recipe in this process, as `tune run` does; return if it ends with status 0."""
    from torchtune._cli import tune  # takes seconds

    sys.argv = ["tune", "run", *arguments]  # which torchtune reads
    try:
        tune.main()
    except SystemExit as end:
        if end.code:
            raise

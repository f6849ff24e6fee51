"""``tune-adaptive search``: a run that ends after its search, and the command that trains with the size found."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from torchtune_adaptive.cli.arguments import PROGRAM, examples
from torchtune_adaptive.cli.tune import check_before_torch, check_recipe, parser_of, run_tune_command
from torchtune_adaptive.errors import InputError, quote
from torchtune_adaptive.files import check_writable, writing
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import config_of, resolve_config_argument, resolved
from torchtune_adaptive.stock.installed import adaptive_name, recipe_files, stock_recipe_files

_HELP = """Find the largest batch size that fits, and end.

OUTPUT_DIR/found.yaml is the config with the sizes found. The last line of the output is the command
that trains with it. No checkpoint is written. TORCHRUN-OPTIONS are those of `run`.

A size is found for one row length, and for everything else that memory depends on."""
SEARCH_EXAMPLES = (
    "search --nproc_per_node 2 adaptive_full_finetune_distributed --config tiny/full",
    "search adaptive_lora_finetune_single_device --config llama3_2/1B_lora_single_device",
    "search --nproc_per_node 8 adaptive_lora_finetune_distributed --config llama3_1/8B_lora"
    " tokenizer.max_seq_len=4096 adaptive.max_tokens_per_micro_batch=auto",
)


def run_search(arguments: Sequence[str]) -> None:
    """Search as ``arguments`` say, and print the command that trains with what was found.

    Raises:
        InputError: a value is refused.
        SystemExit: the search or the command line has ended the program.
    """
    _, launched = _parser_of_help().parse_known_args(arguments)
    check_before_torch(launched)
    run = parser_of("run").parse_args(["run", *launched])
    torchrun_options = launched[: len(launched) - len(run.recipe_args) - 1]
    _check_searches(run.recipe)
    keys = _keys(run.recipe_args)
    path = _found_path(run.recipe_args)
    _launch([*torchrun_options, run.recipe, *run.recipe_args, *keys])
    if path.is_file():  # on the machine of rank 0
        command = ["tune", "run", *torchrun_options, run.recipe, "--config", str(path)]
        print(f"To train with what was found:\n{shlex.join(command)}", flush=True)


def _parser_of_help() -> argparse.ArgumentParser:
    """Takes --help, and leaves the rest, which is for `tune run`, in its order."""
    return argparse.ArgumentParser(
        prog=f"{PROGRAM} search",
        usage=f"{PROGRAM} search [TORCHRUN-OPTIONS] RECIPE --config CONFIG [key=value ...]",
        description=_HELP,
        epilog=examples(*SEARCH_EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _check_searches(recipe: str) -> None:
    """Refuse a recipe that does not exist, or one of torchtune's, which would train instead of searching."""
    check_recipe(recipe)
    name = Path(recipe).stem
    if name in stock_recipe_files():
        hint = f"; did you mean `{adaptive_name(name)}`?" if adaptive_name(name) in recipe_files() else "."
        raise InputError(f"The recipe must be an adaptive one, which can search, but is {quote(recipe)} instead{hint}")


def _keys(recipe_args: Sequence[str]) -> list[str]:
    """The overrides that make a run of the recipe a search alone.

    Raises:
        InputError: the config is refused, or what its search finds cannot be put in a config.
    """
    keys = ["adaptive.search_only=True"]
    if not AdaptiveSettings.from_cfg(_config(recipe_args)).searches:
        keys.insert(0, "use_maximum_batch_size=True")
    AdaptiveSettings.from_cfg(_config([*recipe_args, *keys]))
    return keys


def _found_path(recipe_args: Sequence[str]) -> Path:
    """Where the search will leave its config. One that an earlier search has left is removed.

    Raises:
        InputError: it could not be written.
    """
    from torchtune_adaptive.training.found_config import found_path  # needs torch

    content = resolved(_config(recipe_args))
    if not isinstance(content.get("output_dir"), str):
        raise InputError(f"`output_dir` must be a folder, but is {quote(content.get('output_dir'))} instead.")
    path = found_path(DictConfig(content))
    with writing("output_dir", path.parent, kind="folder"):
        check_writable(path)
        path.unlink(missing_ok=True)
    return path


def _config(recipe_args: Sequence[str]) -> DictConfig:
    cfg = config_of(resolve_config_argument(recipe_args))
    assert cfg is not None, "torchtune's parser has ended a program that is asked for help"
    return cfg


def _launch(arguments: list[str]) -> None:
    """Run the recipe in this process, as `run` does; return if it ends with status 0."""
    try:
        run_tune_command(["run", *arguments])
    except SystemExit as end:
        if end.code:
            raise

"""``tune-adaptive run``, ``ls``, ``cp``, ``cat`` and ``download``: torchtune's commands, with the adaptive recipes too.

torchtune's parsers and commands do the work. In this process, the list of recipes that they read has the adaptive ones.
"""

import argparse
import importlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torchtune_adaptive.cli.arguments import PROGRAM, examples, reader_may_stop
from torchtune_adaptive.errors import InputError, did_you_mean, quote, reason_of
from torchtune_adaptive.output import tolerate_lost_output
from torchtune_adaptive.stock.checks import check_run
from torchtune_adaptive.stock.configs import config_path, resolve_config_argument
from torchtune_adaptive.stock.installed import configs_by_recipe, recipe_files, stock_recipe_files


class TuneCommand(NamedTuple):
    """A command of torchtune's."""

    class_name: str  # of its parser, in the module of `torchtune._cli` that has the command's name
    help: str
    examples: tuple[str, ...]


TUNE_COMMANDS = {
    "run": TuneCommand(
        "Run",
        "run a recipe on one device or, with torchrun's options, on several",
        (
            "run adaptive_lora_finetune_single_device --config llama3_2/1B_lora_single_device"
            " use_maximum_batch_size=True",
            "run --nproc_per_node 2 adaptive_full_finetune_distributed --config tiny/full use_maximum_batch_size=True",
            "run --nproc_per_node 2 full_finetune_distributed --config llama3_2/1B_full",
            "run --nproc_per_node 2 my_recipe.py --config my_config.yaml",
        ),
    ),
    "ls": TuneCommand("List", "list the recipes and configs, ours first", ("ls",)),
    "cp": TuneCommand(
        "Copy",
        "copy a recipe or config",
        ("cp tiny/full my_config.yaml", "cp adaptive_full_finetune_distributed my_recipe.py"),
    ),
    "cat": TuneCommand("Cat", "print a config", ("cat tiny/full", "cat llama3_2/1B_lora --sort")),
    "download": TuneCommand(
        "Download",
        "download a model from the Hugging Face Hub or Kaggle",
        ("download meta-llama/Llama-3.2-1B-Instruct --output-dir /tmp/Llama-3.2-1B-Instruct",),
    ),
}
_OF_TORCHTUNE = re.compile(r"\btune(?= (run|ls|cp|cat|validate|download)\b)")
_WHICH_CONFIGS = (
    "An adaptive recipe takes every config of the stock recipe of that name: adaptive_full_finetune_distributed"
    " takes those of full_finetune_distributed."
)


def run_tune_command(arguments: Sequence[str]) -> None:
    """Run the command of torchtune's that ``arguments`` begin with, as ``tune`` would.

    Raises:
        InputError: there is no such recipe or config, or a file cannot be read or written.
        SystemExit: the recipe, its ranks or the parser have ended the program.
    """
    name = arguments[0]
    sys.argv = [sys.argv[0], *arguments]  # which torchtune's `run` counts
    if name == "run":
        tolerate_lost_output()
        check_before_torch(arguments[1:])
    parser = parser_of(name)
    parsed = parser.parse_args(arguments)
    if name == "run":
        with _file_listed(parsed.recipe):
            _check_run(parsed.recipe, parsed.recipe_args)
            with _ending_as_its_ranks():
                parsed.func(parsed)
        return
    with _ours_listed():
        try:
            with reader_may_stop():
                parsed.func(parsed)
                if name == "ls":
                    print(f"\n{_WHICH_CONFIGS}")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"Files must be readable and writable, but are not: {reason_of(error)}.") from error


def check_before_torch(arguments: Sequence[str]) -> None:
    """Check the config of an adaptive recipe in the arguments of `run`, which torchtune's parser reads seconds later.

    Raises:
        InputError: a key or a value is refused, or a file does not exist.
    """
    places = [place for place, one in enumerate(arguments) if one in recipe_files()]
    if places and "--config" in (recipe_args := arguments[places[0] + 1 :])[:-1]:
        check_run(recipe_args, ranks=1)


class _Parser(argparse.ArgumentParser):
    """A parser of torchtune's that names this program, and has our examples."""

    def __init__(self, *, prog: str, usage: str | None = None, **options: Any) -> None:
        if (name := prog.rpartition(" ")[2]) in TUNE_COMMANDS:
            options["epilog"] = examples(*TUNE_COMMANDS[name].examples)
        super().__init__(prog=_renamed(prog), usage=None if usage is None else _renamed(usage), **options)

    def format_help(self) -> str:
        return _renamed(super().format_help())

    def error(self, message: str) -> NoReturn:
        super().error(_renamed(message))


def _renamed(text: str) -> str:
    """The text with this program's name for torchtune's.

    >>> _renamed("Try `tune ls`.")
    'Try `tune-adaptive ls`.'
    """
    return _OF_TORCHTUNE.sub(PROGRAM, text)


def parser_of(name: str) -> argparse.ArgumentParser:
    """torchtune's parser of its command ``name``, with this program's name and examples."""
    parser = _Parser(prog=PROGRAM)
    module = importlib.import_module(f"torchtune._cli.{name}")
    getattr(module, TUNE_COMMANDS[name].class_name).create(parser.add_subparsers())
    return parser


@contextmanager
def _ours_listed() -> Iterator[None]:
    """Within, torchtune's list of recipes begins with ours and their configs."""
    from torchtune._recipe_registry import Config, Recipe

    own = []
    for name, configs in configs_by_recipe().items():
        listed = [Config(config, str(path)) for config, path in configs.items()]
        own.append(Recipe(name, str(recipe_files()[name]), listed, supports_distributed=True))
    with _listed(own):
        yield


@contextmanager
def _ending_as_its_ranks() -> Iterator[None]:
    """Inside, when ranks fail, torchrun ends with the first one's status, and says nothing after what the rank said."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("api", "errors", "errors.error_handler"):
        # Its lines on failed and ended processes, with their numbers.
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
    try:
        yield
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if failure.exitcode < 0:  # by a signal: the rank has said nothing
                print(f"{PROGRAM} run: rank {rank} was ended by {failure.signal_name()}.", file=sys.stderr)
                sys.exit(128 - failure.exitcode)
        sys.exit(error.get_first_failure()[1].exitcode)


@contextmanager
def _file_listed(recipe: str) -> Iterator[None]:
    """Inside, torchtune runs the file ``recipe``, where it would import another file or none.

    torchtune turns a path into a module's name. `./my_recipe.py` has no such name. Where the working directory has a
    copy of an adaptive recipe, its name may mean either file. Any other recipe is run as a module, as by ``tune run``.
    """
    from torchtune._recipe_registry import Recipe

    path, own, file = Path(recipe), recipe_files(), None
    if recipe in own and Path(f"{recipe}.py").is_file():
        file = own[recipe]
    elif path.suffix == ".py" and path.is_file() and (recipe.startswith(("/", ".")) or recipe[:-3] in own):
        file = path.resolve()
    with _listed([] if file is None else [Recipe(recipe, str(file), [], supports_distributed=True)]):
        yield


@contextmanager
def _listed(recipes: list[Any]) -> Iterator[None]:
    """Within, torchtune's list of recipes, whose paths may be absolute, begins with ``recipes``."""
    from torchtune._recipe_registry import get_all_recipes

    registered = get_all_recipes()
    registered[:0] = recipes
    try:
        yield
    finally:
        del registered[: len(recipes)]


def check_recipe(recipe: str) -> bool:
    """Whether ``recipe`` is a name that ``ls`` lists; otherwise it is a file or a module.

    Raises:
        InputError: it does not exist.
    """
    known = [*recipe_files(), *stock_recipe_files()]
    if recipe in known:
        return True
    if not _is_importable(recipe):
        hint = did_you_mean(recipe, {name: name for name in known})
        raise InputError(
            f"The recipe must be a name that `{PROGRAM} ls` lists or a Python file, but is {quote(recipe)}{hint}"
        )
    return False


def _check_run(recipe: str, recipe_args: list[str]) -> None:
    """Refuse a recipe or config that is not there, before any rank is started; put the config's path for its name."""
    is_known = check_recipe(recipe)
    if "--config" not in recipe_args:
        return  # which torchtune refuses
    if is_known or recipe_args[-1] == "--config":
        recipe_args[:] = resolve_config_argument(recipe_args)
    else:  # which may have arguments of other forms
        place = recipe_args.index("--config") + 1
        recipe_args[place] = str(config_path(recipe_args[place]))


def _is_importable(recipe: str) -> bool:
    """Whether ``recipe`` is a file, or below a package, that torchtune may run."""
    package = recipe.replace("/", ".").partition(".")[0]
    if Path(f"{recipe.removesuffix('.py')}.py").is_file():
        return True
    return package != "" and PathFinder.find_spec(package, [*sys.path, "."]) is not None

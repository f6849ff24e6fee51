"""Reads the command lines of documents as their programs do, and checks them as far as possible without a run."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

from omegaconf import DictConfig
from torchtune._cli.tune import TuneCLIParser
from torchtune._recipe_registry import get_all_recipes

from tests.support.checkout import REPOSITORY
from torchtune_adaptive.cli.arguments import integers
from torchtune_adaptive.cli.commands import _parser
from torchtune_adaptive.cli.plan_hugging_face import names_model, parser_of_models
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.gpu import memory_of
from torchtune_adaptive.plan.hugging_face.run_keys import read_keys
from torchtune_adaptive.ppo.checks import check_turns
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.checks import check_config
from torchtune_adaptive.stock.configs import load_config, method_of, resolved
from torchtune_adaptive.stock.installed import config_files

_OUTPUT_KEPT = re.compile(r"\w+=\$\(.*\)")
# An assignment, or a command that starts another one, with its options.
_BEFORE_A_COMMAND = re.compile(r"[A-Za-z_]\w*=.*|exec|srun|time|-.*|\d+", re.DOTALL)
_NOT_CHECKED = ("cat", "cd", "echo", "export", "git", "ls", "mkdir", "tail")
_PPO = "adaptive_ppo_full_finetune_single_device"
_OWN_RECIPES = {path.stem for path in (REPOSITORY / "recipes").glob("*.py")}


class WrongCommand(Exception):
    """A command line that a reader must not copy; the message says why."""


def commands(script: str) -> Iterator[list[str]]:
    """The words of each command of a shell script, without assignments before it.

    >>> list(commands("A=1 tune ls && make test  # both"))
    [['tune', 'ls'], ['make', 'test']]
    """
    for line in script.replace("\\\n", " ").splitlines():
        if _OUTPUT_KEPT.fullmatch(line):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in (*lexer, ";"):
            if set(word) <= set(";&|"):
                if words:
                    yield words
                words = []
            elif words or not _BEFORE_A_COMMAND.fullmatch(word):
                words.append(word)


@dataclass
class PageCommands:
    """Checks the commands of one document, in their order.

    A file whose name begins with ``my_`` is the reader's own: a copy, if an earlier command has made it.

    Attributes:
        copies: the files that commands have written, by the recipe or config that each is made from.
        output_dirs: where runs that can be run here have written.
        runs: whether the command checked last can be run here: without a GPU, a download, or a large model.
        cfg: the config of a tiny model with which the command checked last trains; None if there is none.
    """

    copies: dict[str, str] = field(default_factory=dict)
    output_dirs: set[str] = field(default_factory=set)
    runs: bool = False
    cfg: DictConfig | None = None

    def check(self, words: Sequence[str]) -> None:
        """Check one command.

        Raises:
            WrongCommand: its program would refuse it, or there is no check for that program.
        """
        checks: dict[str, Callable[[list[str]], None]] = {
            "make": self._make,
            "pip": self._pip,
            "python": self._python,
            "python3": self._python,
            "torchrun": self._torchrun,
            "tune": self._tune,
            "tune-adaptive": self._tune_adaptive,
        }
        program, *arguments = words
        self.runs, self.cfg = False, None
        if program in _NOT_CHECKED:
            return
        if program not in checks:
            raise WrongCommand(f"{shlex.join(words)}: no check is for `{program}`")
        if program in ("tune", "tune-adaptive") and not {"--help", "--version"}.isdisjoint(arguments):
            self.runs = True
            return
        try:
            checks[program](arguments)
        except (InputError, WrongCommand) as refusal:
            raise WrongCommand(f"{shlex.join(words)}: {refusal}") from refusal

    def _tune(self, arguments: list[str]) -> None:
        command, *rest = arguments
        _parsed(_torchtunes_parser(), arguments)
        named = [word for word in rest if not word.startswith("-")]
        if command == "run":
            self._run(arguments)
        elif command in ("cp", "cat", "validate"):  # which do not know our recipes and configs
            if named[0] in _OWN_RECIPES or named[0] in config_files():
                raise WrongCommand(f"torchtune has no {named[0]}")
            if named[0] not in _recipes():
                self._config(named[0], [])
            if command == "cp":
                self.copies[_plain(named[1])] = named[0]
        is_there = not any(_is_readers(self._original(word)) for word in named)
        self.runs = self.cfg is not None if command == "run" else command != "download" and is_there

    def _tune_adaptive(self, arguments: list[str]) -> None:
        command, *rest = arguments
        if command in ("search", "fastest"):
            self._run(["run", *rest])
            self.runs = self.cfg is not None
        elif command == "cp":
            parsed, _ = _parsed(_parser(), arguments)
            self.copies[_plain(str(parsed.destination))] = parsed.name
            self.runs = True
        elif names_model(arguments):
            parsed, others = _parsed(parser_of_models(), rest, allows_others=True)
            read_keys(None, [*parsed.keys, *others])
            memory_of(parsed.memory)
            self.runs = False  # the model is on the Hub
        else:
            parsed, others = _parsed(_parser(), arguments, allows_others=True)
            if others and ("overrides" not in parsed or any(other.startswith("-") for other in others)):
                raise WrongCommand(f"`tune-adaptive {command}` does not take {' '.join(others)}")
            if vars(parsed).get("config") is not None:
                method_of(self._config(parsed.config, [*parsed.overrides, *others]))
            if command == "plan":
                for option in ("--seq-len", "--batch-size", "--nproc_per_node", "--nnodes"):
                    if (text := getattr(parsed, option.removeprefix("--").replace("-", "_"))) is not None:
                        integers(option, text)
                for gpu in parsed.memory.split(",") if parsed.memory else ():
                    memory_of(gpu)
            self.runs = command == "plan" or not self.output_dirs.isdisjoint(rest)

    def _run(self, arguments: list[str]) -> None:
        """Check a recipe with its config and overrides, as the recipe itself does before it is set up."""
        launch, _ = _parsed(_torchtunes_parser(), arguments)
        recipe, recipe_arguments = self._original(launch.recipe), list(launch.recipe_args)
        if recipe not in _recipes() and not _is_readers(recipe):
            raise WrongCommand(f"there is no recipe {recipe}")
        if "--config" not in recipe_arguments[:-1]:
            raise WrongCommand("`--config` is missing")
        place = recipe_arguments.index("--config")
        name = self._original(recipe_arguments[place + 1])
        cfg = self._config(name, [*recipe_arguments[:place], *recipe_arguments[place + 2 :]])
        has_checks = recipe in _OWN_RECIPES and not _is_readers(name)
        if has_checks and recipe == _PPO:
            check_turns(cfg)
        elif has_checks:
            if method_of(cfg) != re.sub("^adaptive_|_distributed$|_single_device$", "", recipe):
                raise WrongCommand(f"{recipe} does not train by {name}, which is for {method_of(cfg)}")
            ranks = _number(launch.nproc_per_node) * _number(launch.nnodes)
            check_config(cfg, ranks=ranks)
            if recipe.endswith("_single_device") and ranks > 1:
                raise WrongCommand(f"{recipe} is for one process, not for {ranks}")
        if name.startswith("tiny/"):
            self.cfg = cfg
            self.output_dirs.add(cfg.output_dir)
        self.copies[f"{cfg.output_dir}/found.yaml"] = name  # which `tune-adaptive search` writes

    def _config(self, name: str, overrides: Sequence[str]) -> DictConfig:
        """The config, checked. The reader's own config counts as one of a tiny model."""
        name = self._original(name)
        cfg = load_config("tiny/full" if _is_readers(name) else name, overrides)
        resolved(cfg)
        AdaptiveSettings.from_cfg(cfg)
        return cfg

    def _original(self, name: str) -> str:
        return self.copies.get(_plain(name), name)

    def _make(self, arguments: list[str]) -> None:
        targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
        if wrong := [word for word in arguments if word not in targets and "=" not in word]:
            raise WrongCommand(f"the Makefile has no target {wrong[0]}")

    def _pip(self, arguments: list[str]) -> None:
        project = (REPOSITORY / "pyproject.toml").read_text()
        for word in arguments:
            for extra in re.findall(r"[\w-]+", word.partition("[")[2]):
                if f"\n{extra} = [" not in project:
                    raise WrongCommand(f"pyproject.toml has no extra {extra}")
            if word.endswith(".txt"):
                self._file(word)

    def _python(self, arguments: list[str]) -> None:
        if arguments[0] == "-m":
            if find_spec(arguments[1]) is None:
                raise WrongCommand(f"there is no module {arguments[1]}")
            self.runs = arguments[1] == "torchtune_adaptive.tiny"
        else:
            self._file(arguments[0])

    def _torchrun(self, arguments: list[str]) -> None:
        self._file(next((word for word in arguments if word.endswith(".py")), ""))

    def _file(self, path: str) -> None:
        if path != "examples/NAME.py" and not (REPOSITORY / path).is_file():
            raise WrongCommand(f"there is no file {path!r}")


@cache
def _torchtunes_parser() -> argparse.ArgumentParser:
    return TuneCLIParser()._parser


def _recipes() -> set[str]:
    return _OWN_RECIPES | {one.name for one in get_all_recipes()}


def _plain(path: str) -> str:
    return path.removeprefix("./")


def _is_readers(name: str) -> bool:
    return name.rpartition("/")[2].startswith("my_")


def _number(text: str) -> int:
    """The number at the start of ``text``, an option of torchrun; 2 if it is known only at the launch."""
    found = re.match(r"\d+", text)
    return 2 if found is None else int(found[0])


def _parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str], *, allows_others: bool = False
) -> tuple[argparse.Namespace, list[str]]:
    """What the parser reads.

    Raises:
        WrongCommand: it refuses.
    """
    try:
        parsed, others = parser.parse_known_args(arguments)
    except (SystemExit, argparse.ArgumentError) as refusal:
        raise WrongCommand(f"{parser.prog} cannot read {shlex.join(arguments)}") from refusal
    if others and not allows_others:
        raise WrongCommand(f"{parser.prog} does not take {' '.join(others)}")
    return parsed, others

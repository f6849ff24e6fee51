"""What the commands of `tune-adaptive` have in common, and `cp`."""

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from torchtune._recipe_registry import get_all_recipes

from tests.support.checkout import REPOSITORY
from tests.support.full_disk import FullDisk
from tests.support.program import Ended, Program
from torchtune_adaptive.cli import main
from torchtune_adaptive.stock.configs import config_path
from torchtune_adaptive.stock.installed import config_files

RECIPES = {path.stem: path for path in sorted((REPOSITORY / "recipes").glob("*.py"))}
COMMANDS = ("plan", "search", "fastest", "report", "cp")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples_whose_names_exist(command: str, program: Program) -> None:
    ended = program(command, "--help")
    assert ended.status == 0
    examples = [line.split() for line in ended.out.partition("\nexamples:\n")[2].splitlines()]
    assert examples
    for program_name, of_command, *words in examples:
        assert (program_name, of_command) == ("tune-adaptive", command)
        for word in words:
            assert config_path(word).exists() or not re.fullmatch(r"(tiny|llama\w*)/\w+", word), word
            assert word in RECIPES or not re.search(r"_(distributed|single_device)$", word.partition("/")[0]), word


def test_the_programs_help_lists_commands_and_exit_statuses(program: Program) -> None:
    ended = program("--help")
    assert ended.status == 0
    for command in COMMANDS:
        assert re.search(rf"^    {command}\b", ended.out, re.M), command
    assert [int(status) for status in re.findall(r"^  (\d+)  ", ended.out, re.M)] == [0, 1, 2]


def test_the_version_is_that_of_the_package(program: Program) -> None:
    expected = f"tune-adaptive {version('torchtune-adaptive')} (torchtune 0.6.1, torch {version('torch')})\n"
    assert program("--version") == Ended(0, expected, "")


def test_an_unknown_command_has_status_two(program: Program) -> None:
    ended = program("run", "adaptive_full_finetune_distributed", "--config", "tiny/full")
    assert (ended.status, ended.out) == (2, "")
    assert "argument COMMAND: invalid choice: 'run'" in ended.err


def test_a_working_directory_that_was_deleted_is_refused(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch cannot be imported without one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    tmp_path.rmdir()
    sentence = f"The working directory '{tmp_path}' has been deleted."
    program.refuses("plan", "--config", "tiny/full", sentence=sentence)


def test_a_reader_that_has_read_enough_ends_a_command_without_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as ended:
            main(["cp", "tiny/full", str(tmp_path)])
    assert ended.value.code == 0


@pytest.mark.parametrize("arguments", [["cp", "tiny/full", "copy.yaml"], ["plan", "--help"]], ids=" ".join)
def test_output_on_a_full_disk_is_said_in_one_sentence(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    assert ended.value.code == (
        f"tune-adaptive {arguments[0]}: Standard output cannot be written: No space left on device."
    )


def test_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended:
        main(["cp", "tiny/full", str(tmp_path)])
    assert ended.value.code == 0


# ---- cp


def test_the_configs_have_names_that_torchtunes_have_not() -> None:
    assert set(config_files().values()) == set((REPOSITORY / "configs").rglob("*.yaml"))
    assert config_files().keys().isdisjoint(config.name for recipe in get_all_recipes() for config in recipe.configs)


@pytest.mark.parametrize(
    ("name", "original"), [*list(RECIPES.items())[:1], ("tiny/lora", REPOSITORY / "configs/tiny/lora.yaml")]
)
def test_cp_copies_a_recipe_or_config(name: str, original: Path, program: Program, tmp_path: Path) -> None:
    for destination, copy in ((tmp_path / "mine", tmp_path / "mine"), (tmp_path, tmp_path / original.name)):
        assert program("cp", name, str(destination)) == Ended(0, f"Copied to {copy}\n", "")
        assert copy.read_bytes() == original.read_bytes()


def test_cp_refuses_a_destination_that_cannot_be_written(program: Program, tmp_path: Path) -> None:
    destination = f"{tmp_path}/no/folder"
    program.refuses("cp", "tiny/full", destination, sentence=f"'{destination}': No such file or directory.")
    with FullDisk(os, "fsync"):
        program.refuses("cp", "tiny/full", str(tmp_path / "copy"), sentence="copy': No space left on device.")
    assert list(tmp_path.iterdir()) == []


def test_cp_of_an_unknown_name_lists_the_names(program: Program, tmp_path: Path) -> None:
    ended = program("cp", "nosuch", str(tmp_path))
    assert (ended.status, ended.out) == (2, "")
    assert all(f"'{name}'" in ended.err for name in (*RECIPES, *config_files()))

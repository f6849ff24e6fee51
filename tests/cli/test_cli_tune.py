"""`tune-adaptive` has torchtune's commands, which also know the adaptive recipes and configs."""

import faulthandler
import os
import re
import runpy
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torchtune._cli.run
import yaml
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing import errors
from torchtune._cli import tune as stock_tune
from torchtune._recipe_registry import get_all_recipes

from tests.support.program import Ended, Program
from torchtune_adaptive.cli import tune
from torchtune_adaptive.cli.tune import TUNE_COMMANDS
from torchtune_adaptive.stock import checks
from torchtune_adaptive.stock.configs import config_path, load_config, resolved
from torchtune_adaptive.stock.installed import configs_by_recipe
from torchtune_adaptive.training.run_log import LOG_NAME

REPOSITORY = Path(__file__).parents[2]
RECIPES = {path.stem: path for path in sorted((REPOSITORY / "recipes").glob("*.py"))}
CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))
OWN = "adaptive_full_finetune_single_device"
NAMES_TUNE = re.compile(r"\btune(?!-adaptive)\b (run|ls|cp|cat|validate|download)")


@pytest.fixture(autouse=True)
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another working directory; the program's changes to this process are undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tune-adaptive"])
    monkeypatch.setattr(sys, "path", [*sys.path])


# ---- recipes and configs of this package


def test_every_config_is_listed_with_a_recipe_and_has_a_name_of_its_own() -> None:
    listed = configs_by_recipe()
    assert {path for of_recipe in listed.values() for path in of_recipe.values()} == set(CONFIGS)
    assert listed["adaptive_full_finetune_distributed"]["tiny/full"] == REPOSITORY / "configs/tiny/full.yaml"
    names = {name for of_recipe in listed.values() for name in of_recipe}
    assert names.isdisjoint(config.name for recipe in get_all_recipes() for config in recipe.configs)


# ---- ls, cp, cat


def test_ls_lists_adaptive_recipes_before_those_of_tune(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    ended = program("ls")
    stock_tune.TuneCLIParser()._parser.parse_args(["ls"]).func(None)
    header, *stock_rows = capsys.readouterr().out.splitlines()
    first, *rows = ended.out.splitlines()
    assert (ended.status, first) == (0, header)
    own, last = rows[: -len(stock_rows) - 2], rows[-1]
    assert rows[len(own) : -2] == stock_rows
    names = {name for of_recipe in configs_by_recipe().values() for name in of_recipe}
    assert {word for row in own for word in row.split()} == RECIPES.keys() | names | {"<>"}
    assert last.startswith("An adaptive recipe takes every config of the stock recipe of that name")


@pytest.mark.parametrize(
    ("name", "original"), [(OWN, RECIPES[OWN]), ("tiny/lora", REPOSITORY / "configs/tiny/lora.yaml")]
)
def test_cp_copies_an_adaptive_recipe_or_config(name: str, original: Path, program: Program, tmp_path: Path) -> None:
    assert program("cp", name, "new/mine", "--make-parents").status == 0
    assert (tmp_path / "new" / f"mine{original.suffix}").read_bytes() == original.read_bytes()
    (tmp_path / "new" / f"mine{original.suffix}").write_text("kept")
    assert program("cp", name, "new/mine", "-n").status == 0
    assert (tmp_path / "new" / f"mine{original.suffix}").read_text() == "kept"


@pytest.mark.parametrize("name", ["tiny/full", "llama3_2/1B_full", "mine.yaml"])
def test_cat_prints_an_adaptive_stock_or_user_config(name: str, program: Program) -> None:
    Path("mine.yaml").write_text("seed: 5\n")
    ended = program("cat", name)
    assert (ended.status, ended.err) == (0, "")
    assert yaml.safe_load(ended.out) == yaml.safe_load(config_path(name).read_text())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["cp", "nosuch", "."], "tune-adaptive cp: error: Invalid file name: nosuch. Try `tune-adaptive ls` to see"),
        (["cat", "nosuch.yaml"], "tune-adaptive cat: error: Config 'nosuch.yaml' not found."),
        (["run", OWN], "tune-adaptive run: error: The '--config' argument is required."),
        (["nosuch"], "tune-adaptive: error: argument COMMAND: invalid choice: 'nosuch'"),
    ],
)
def test_a_wrong_command_line_has_status_two_and_names_this_program(
    arguments: list[str], sentence: str, program: Program
) -> None:
    ended = program(*arguments)
    assert (ended.status, ended.out) == (2, "")
    assert sentence in ended.err
    assert not NAMES_TUNE.search(ended.err)


@pytest.mark.parametrize("arguments", [["cat", "folder.yaml"], ["cp", "tiny/full", "file/full"]])
def test_a_file_that_cannot_be_read_or_written_is_refused(arguments: list[str], program: Program) -> None:
    Path("folder.yaml").mkdir()
    Path("file").touch()
    program.refuses(*arguments, sentence="Files must be readable and writable, but are not: ")


def test_a_reader_of_the_list_may_stop_early() -> None:
    """A pipe without a reader, as in `tune-adaptive ls | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    program = "from torchtune_adaptive.cli.main import main; main(['ls'])"
    ended = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert ended.returncode == 0
    assert b"BrokenPipeError" not in ended.stderr


# ---- run


class Launched(NamedTuple):
    """What torchtune's `run` starts: a new process for each rank, or a recipe in this process."""

    ranks: str | None
    is_module: bool
    recipe: str
    arguments: list[str]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Records launches instead of starting them. The files that configs name need not exist."""
    found: list[Launched] = []
    monkeypatch.setattr(checks, "check_input_files", lambda _: None)

    def with_torchrun(args: Any) -> None:
        assert args.standalone
        found.append(Launched(args.nproc_per_node, args.module, args.training_script, args.training_script_args))

    monkeypatch.setattr(faulthandler, "enable", lambda **_: None)  # by torch, which needs a real standard error
    monkeypatch.setattr(torchtune._cli.run, "run", with_torchrun)
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: found.append(Launched(None, True, name, sys.argv[1:])))
    monkeypatch.setattr(runpy, "run_path", lambda path, **_: found.append(Launched(None, False, path, sys.argv[1:])))
    return found


OPTIONS = ([], ["--nproc_per_node", "2"], ["--nproc-per-node=2", "--max-restarts", "1"])
PAIRS = [
    (OWN, "llama3_2/1B_full_single_device"),
    ("adaptive_lora_finetune_distributed", "llama3_2/1B_lora"),
    ("adaptive_ppo_full_finetune_single_device", "mistral/7B_full_ppo_low_memory"),
    ("full_finetune_distributed", "llama3_2/1B_full"),
    ("mine.py", "llama3_2/1B_full"),
    ("folder/mine.py", "config.yaml"),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_recipe_is_launched_as_tune_launches_it(
    pair: tuple[str, str],
    options: list[str],
    program: Program,
    launched: list[Launched],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tune, "check_run", lambda *_, **__: None)  # not all that torchtune's configs need is here
    recipe, config = pair
    Path("folder").mkdir()
    for name in ("mine.py", "folder/mine.py", "config.yaml"):
        Path(name).touch()
    arguments = ["run", *options, recipe, "--config", config, "batch_size=3"]
    assert program(*arguments).status == 0
    monkeypatch.setattr(sys, "argv", ["tune", *arguments])
    stock_tune.main()
    ours, stock = launched
    assert ours == stock
    assert ours.ranks == ("2" if options else None)


@pytest.mark.parametrize("recipe", [OWN, "full_finetune_single_device", "mine.py"])
def test_every_recipe_accepts_an_adaptive_config(recipe: str, program: Program, launched: list[Launched]) -> None:
    Path("mine.py").touch()
    assert program("run", recipe, "--config", "tiny/full").status == 0
    (one,) = launched
    assert one.arguments == ["--config", str(REPOSITORY / "configs/tiny/full.yaml")]


@pytest.mark.parametrize(
    ("recipe", "is_copy"), [(OWN, False), (f"{OWN}.py", True), (f"./{OWN}.py", True), ("/{}/mine.py", True)]
)
@pytest.mark.parametrize("options", OPTIONS[:2])
def test_a_recipes_name_means_the_installed_one_and_a_file_name_means_a_copy(
    recipe: str, is_copy: bool, options: list[str], program: Program, launched: list[Launched], tmp_path: Path
) -> None:
    for copy in (f"{OWN}.py", "mine.py"):
        Path(copy).touch()
    recipe = recipe.replace("/{}", str(tmp_path))
    assert program("run", *options, recipe, "--config", "tiny/full").status == 0
    (one,) = launched
    assert not one.is_module
    assert Path(one.recipe) == (tmp_path / Path(recipe).name if is_copy else RECIPES[OWN])


RUN_REFUSED = {
    "misspelt recipe": (
        ["adaptive_full_finetune_single_devic", "--config", "tiny/full"],
        f"but is 'adaptive_full_finetune_single_devic'; did you mean `{OWN}`?",
    ),
    "missing file": (["nosuch.py", "--config", "tiny/full"], "or a Python file, but is 'nosuch.py'."),
    "unknown config": ([OWN, "--config", "tiny/ful"], "must be the name or path of a config, but is 'tiny/ful'."),
    "stock recipe": (["full_finetune_distributed", "--config", "tiny/ful"], "but is 'tiny/ful'."),
    "config left out": ([OWN, "--config"], "`--config` must be followed by the name or path of a config"),
    "file's config left out": (["mine.py", "--config"], "`--config` must be followed by the name or path of a config"),
    "empty recipe": (["", "--config", "tiny/full"], "or a Python file, but is ''."),
    "override": ([OWN, "--config", "tiny/full", "seed"], "An override must have the form key=value, but is 'seed'"),
}


@pytest.mark.parametrize("case", RUN_REFUSED)
@pytest.mark.parametrize("options", OPTIONS[:2])
def test_a_wrong_recipe_or_config_is_refused_in_one_sentence_before_anything_is_launched(
    case: str, options: list[str], program: Program, launched: list[Launched]
) -> None:
    Path("mine.py").touch()
    arguments, sentence = RUN_REFUSED[case]
    program.refuses("run", *options, *arguments, sentence=sentence)
    assert launched == []


def test_a_file_of_the_user_may_have_arguments_of_its_own(program: Program, launched: list[Launched]) -> None:
    Path("mine.py").touch()
    assert program("run", "mine.py", "--fast", "--config", "tiny/full", "yes").status == 0
    assert launched[0].arguments[0] == "--fast"


@pytest.mark.parametrize(
    ("exitcode", "status", "said"),
    [
        (1, 1, ""),
        (75, 75, ""),
        (-signal.SIGKILL, 128 + signal.SIGKILL, "tune-adaptive run: rank 3 was ended by SIGKILL.\n"),
    ],
)
def test_torchrun_is_silent_after_a_rank_has_said_why_it_ends(
    exitcode: int,
    status: int,
    said: str,
    program: Program,
    launched: list[Launched],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def fail(args: Any) -> None:
        errors.logger.error("failed (exitcode: 1) local_rank: 0")
        failure = errors.ProcessFailure(local_rank=1, pid=7, exitcode=exitcode, error_file=str(tmp_path / "error.json"))
        raise errors.ChildFailedError("recipe", {3: failure})

    monkeypatch.setattr(torchtune._cli.run, "run", fail)
    ended = program("run", "--nproc_per_node", "2", OWN, "--config", "tiny/full")
    assert (ended.status, ended.err) == (status, said)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_programs_status_is_the_recipes(ranks: int, tiny_dir: Path, tmp_path: Path) -> None:
    """One run searches and trains from another directory; another one is refused."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'recipes'}"}
    command = [sys.executable, "-m", "torchtune_adaptive.cli.main", "run"]
    command += [] if ranks == 1 else ["--nproc_per_node", str(ranks)]
    command += ["adaptive_full_finetune_distributed", "--config", "tiny/full", f"tiny_dir={tiny_dir}", "epochs=1"]
    command += [f"output_dir={tmp_path / 'out'}", "use_maximum_batch_size=True", "max_steps_per_epoch=2"]
    for override, status in (("adaptive.margin=0.1", 0), ("adaptive.margin=7", 1)):
        run = subprocess.run([*command, override], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert run.returncode == status, run.stderr[-3000:]
    assert run.stderr.endswith("tune-adaptive run: `adaptive.margin` must be in [0, 1), but is 7 instead.\n")
    assert run.stderr.count("must be in [0, 1)") == 1
    assert (tmp_path / "out" / LOG_NAME).exists()


# ---- validate


@pytest.mark.parametrize(
    ("name", "recipes"),
    [
        ("tiny/full", ["adaptive_full_finetune_distributed", "adaptive_full_finetune_single_device"]),
        ("llama3_1/8B_full_dpo", ["adaptive_full_dpo_distributed"]),
        ("mistral/7B_full_ppo_low_memory", ["adaptive_ppo_full_finetune_single_device"]),
    ],
)
def test_a_good_config_is_printed_resolved_with_the_recipes_that_train_by_it(
    name: str, recipes: list[str], program: Program
) -> None:
    overrides = ["batch_size=8", "output_dir=/mine", "optimizer=torch.optim.AdamW"]
    ended = program("validate", name, *overrides)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith(f"# Config is well-formed. Adaptive recipes for it: {', '.join(recipes)}.\n")
    assert OmegaConf.to_container(OmegaConf.create(ended.out)) == resolved(load_config(name, overrides))
    assert "${" not in ended.out


def test_a_config_of_another_recipe_is_valid_unless_it_has_adaptive_keys(program: Program) -> None:
    ended = program("validate", "generation")
    assert ended.status == 0
    assert ended.out.startswith(
        "# Config is well-formed. No adaptive recipe can train with it: The config must be a training config, "
    )
    program.refuses("validate", "generation", "use_maximum_batch_size=True", sentence="but has no `optimizer`.")


INVALID = {
    "unknown config": (["tiny/ful"], "`--config` must be the name or path of a config, but is 'tiny/ful'."),
    "our key": (["tiny/full", "adaptive.margin=7"], "`adaptive.margin` must be in [0, 1), but is 7 instead."),
    "option": (["tiny/full", "epochs=0"], "`epochs` must be at least 1, but is 0 instead."),
    "combination": (["tiny/full", "compile=True", "use_maximum_batch_size=True"], "`compile` must be False"),
    "method": (["tiny/full", "loss=torchtune.dev.grpo.loss.GRPOLoss", "adaptive.margin=0.1"], "`loss` must be one of"),
    "unknown component": (["tiny/full", "tokenizer=torchtune.nothing"], "must be well-formed, but is not: "),
    "missing package": (["tiny/full", "tokenizer=nothing.at.all"], "nothing.at.all"),
    "empty part": (["tiny/full", "tokenizer=torchtune..data"], "'torchtune..data'"),
    "no name": (["tiny/full", "tokenizer=5"], "`tokenizer._component_` must be a dotted name, but is 5 instead."),
    "unknown argument": (["tiny/full", "model.foo=1"], "foo"),
    "interpolation": (["tiny/full", "seed=${nosuchkey}"], "nosuchkey"),
}


@pytest.mark.parametrize("case", INVALID)
def test_a_bad_config_is_refused_in_one_sentence(case: str, program: Program) -> None:
    arguments, sentence = INVALID[case]
    program.refuses("validate", *arguments, sentence=sentence)


def test_a_component_of_the_working_directory_is_found(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my_losses.py").write_text("def mine(): ...\n")
    assert program("validate", "tiny/full", "loss=my_losses.mine").status == 0
    monkeypatch.delitem(sys.modules, "my_losses")


# ---- help


@pytest.mark.parametrize("command", [*TUNE_COMMANDS, "validate", "search", "plan", "calibrate", "report"])
def test_every_command_has_help_with_examples_whose_names_exist(command: str, program: Program) -> None:
    ended = program(command, "--help")
    assert ended.status == 0
    assert not NAMES_TUNE.search(ended.out)
    examples = [line.split() for line in ended.out.partition("\nexamples:\n")[2].splitlines()]
    assert examples
    known = {*RECIPES, *(recipe.name for recipe in get_all_recipes())}
    for program_name, of_command, *words in examples:
        assert (program_name, of_command) == ("tune-adaptive", command)
        for word in words:
            assert config_path(word).exists() or not re.fullmatch(r"(tiny|llama\w*)/\w+", word), word
            assert word in known or not re.search(r"_(distributed|single_device)$", word.partition("/")[0]), word


def test_the_programs_help_lists_commands_and_exit_statuses(program: Program) -> None:
    ended = program("--help")
    assert ended.status == 0
    for command in (*TUNE_COMMANDS, "validate", "search", "plan", "calibrate", "report"):
        assert re.search(rf"^    {command}\b", ended.out, re.M), command
    assert [int(status) for status in re.findall(r"^  (\d+)  ", ended.out, re.M)] == [0, 1, 2, 75]


def test_the_version_is_that_of_the_package(program: Program) -> None:
    ended = program("--version")
    expected = f"tune-adaptive {version('torchtune-adaptive')} (torchtune 0.6.1, torch {version('torch')})\n"
    assert ended == Ended(0, expected, "")

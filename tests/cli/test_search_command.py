"""`tune-adaptive search` ends after the search, and writes a config that trains with the sizes found."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.recipes.test_tune_run import SHORT
from tests.support.checkout import environment, tune_run
from tests.support.ppo_runs import LIMIT_BYTES, ppo_assets, ppo_config
from tests.support.program import Ended, Program
from tests.support.recipe_runs import SHALLOW, adaptive_recipe, set_up, shallow_assets, tiny_config, trained
from tests.support.run_logs import events_in, lines_in
from tests.support.toys import search_result
from torchtune_adaptive.cli import search
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.errors import InputError, RunEnded
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import load_config
from torchtune_adaptive.training.checkpoints.folder import read_checkpoint
from torchtune_adaptive.training.found_config import end_search, found_values
from torchtune_adaptive.training.run_log import LOG_NAME
from torchtune_adaptive.training.sizes import Sizes

RECIPE = "adaptive_full_finetune_distributed"
SEARCHED = Sizes(result=search_result(), seq_len=8, fitting_rows=8)  # 13 fit, 8 are used
IN_TOKENS = Sizes(result=search_result(), token_budget=110, fitting_rows=8)
MAXIMUM: dict[str, Any] = {"use_maximum_batch_size": True, "search_only": True}
AUTO: dict[str, Any] = {"max_tokens_per_micro_batch": "auto", "search_only": True}


# ---- what is put in the config


@pytest.mark.parametrize(
    ("settings", "sizes", "rows", "values"),
    [
        (MAXIMUM | {"max_tokens_per_micro_batch": 512}, SEARCHED, 4, {"batch_size": 8}),
        (MAXIMUM | {"global_batch_size": 64}, SEARCHED, 64, {"batch_size": 8}),
        (MAXIMUM | {"global_batch_size": 12}, SEARCHED, 12, {"batch_size": 12}),
        (MAXIMUM | {"objective": "speed"}, SEARCHED, 4, {"batch_size": 8, "adaptive.objective": "memory"}),
        (
            MAXIMUM | {"objective": "speed", "global_batch_size": 64},
            IN_TOKENS,
            64,
            {"adaptive.max_tokens_per_micro_batch": 110, "adaptive.objective": "memory"},
        ),
        (AUTO, IN_TOKENS, 4, {"adaptive.max_tokens_per_micro_batch": 110}),
        (AUTO | MAXIMUM, IN_TOKENS, 4, {"adaptive.max_tokens_per_micro_batch": 110, "batch_size": 8}),
        (AUTO | MAXIMUM | {"global_batch_size": 64}, IN_TOKENS, 64, {"adaptive.max_tokens_per_micro_batch": 110}),
    ],
)
def test_all_that_was_found_is_among_the_values(
    settings: dict[str, Any], sizes: Sizes, rows: int, values: dict[str, Any]
) -> None:
    assert found_values(AdaptiveSettings(**settings), sizes, rows=rows) == values


def test_the_config_is_unchanged_except_for_the_sizes(tmp_path: Path) -> None:
    overrides = [f"output_dir={tmp_path / 'a dir'}", "optimizer.lr=2e-5", "seed=null", "checkpointer.max_filename=0003"]
    cfg = load_config("tiny/full", [*overrides, "use_maximum_batch_size=True", "adaptive.search_only=True"])
    before = OmegaConf.to_container(cfg)
    with pytest.raises(RunEnded) as end:
        end_search(cfg, {"batch_size": 8}, seq_len=256, consensus=Consensus())
    path = tmp_path / "a dir" / "found.yaml"
    assert OmegaConf.to_container(cfg) == before
    assert load_config(str(path)) == load_config("tiny/full", [*overrides, "batch_size=8"])
    assert OmegaConf.to_container(load_config(str(path)))["tokenizer"]["path"] == "${tiny_dir}/tokenizer.model"  # pyright: ignore
    assert path.read_text().startswith(
        "# The sizes that a search found (rows of 256 tokens, 1 rank): batch_size 8\ntiny_dir"
    )
    sentence = f"the search found batch_size 8 (rows of 256 tokens, 1 rank); the config with it is {path}."
    assert (end.value.status, str(end.value)) == (0, sentence)


def test_keys_that_interpolate_a_size_keep_their_value(tmp_path: Path) -> None:
    interpolated: Any = {"adaptive": {"global_batch_size": "${batch_size}"}, "dataset": [{"name": "of_${batch_size}"}]}
    cfg = OmegaConf.create({"output_dir": str(tmp_path), "log_dir": "${output_dir}", "batch_size": 24} | interpolated)
    with pytest.raises(RunEnded):
        end_search(cfg, {"batch_size": 4}, seq_len=8, consensus=Consensus())
    found = OmegaConf.to_container(load_config(str(tmp_path / "found.yaml")))
    kept = {"adaptive": {"global_batch_size": 24}, "dataset": [{"name": "of_24"}], "log_dir": "${output_dir}"}
    assert found == {"output_dir": str(tmp_path), "batch_size": 4, "use_maximum_batch_size": False} | kept


def test_a_config_without_the_adaptive_block_gets_one(tmp_path: Path) -> None:
    cfg = OmegaConf.create({"output_dir": str(tmp_path), "adaptive": None, "batch_size": 2})
    OmegaConf.set_struct(cfg, True)
    with pytest.raises(RunEnded):
        end_search(cfg, {"adaptive.max_tokens_per_micro_batch": 512}, seq_len=None, consensus=Consensus())
    found = AdaptiveSettings.from_cfg(load_config(str(tmp_path / "found.yaml")))
    assert found == AdaptiveSettings(max_tokens_per_micro_batch=512)


def test_a_config_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cfg = OmegaConf.create({"output_dir": str(tmp_path / "file")})
    with pytest.raises(InputError, match="`output_dir` cannot be written: folder"):
        end_search(cfg, {"batch_size": 8}, seq_len=8, consensus=Consensus())


# ---- in a recipe


def searched(kind: str, tiny_dir: Path, output_dir: Path, **options: Any) -> DictConfig:
    """The config that a search of a recipe writes. The steps of an earlier run in the same folder are kept."""
    step = '{"step":1,"epoch":0}'
    (output_dir / LOG_NAME).write_text(f"{step}\n")
    cfg = tiny_config(kind, shallow_assets(tiny_dir), output_dir, **short(options))
    with pytest.raises(RunEnded) as end:
        set_up(adaptive_recipe(kind), cfg)
    assert end.value.status == 0
    assert {path.name for path in output_dir.iterdir()} == {LOG_NAME, "adaptive.lock", "found.yaml"}
    assert (output_dir / LOG_NAME).read_text().splitlines()[0] == step
    assert [line.get("event") for line in lines_in(output_dir)] == [None, "search only", "search", "sizes"]
    return load_config(str(output_dir / "found.yaml"))


def short(options: dict[str, Any]) -> dict[str, Any]:
    search = {"memory_limit": "64MiB", "search_only": True} | options.pop("adaptive", {})
    return SHALLOW | {"epochs": 1, "max_steps_per_epoch": 2, "tokenizer__max_seq_len": 64, "adaptive": search} | options


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lora_dpo_single", {"use_maximum_batch_size": True, "adaptive": {"global_batch_size": 32}}),
        ("lora_single", {"batch_size": 16, "adaptive": {"max_tokens_per_micro_batch": "auto"}}),
    ],
)
def test_a_run_with_the_found_config_has_the_sizes_of_a_run_that_searches(
    kind: str, options: dict[str, Any], tiny_dir: Path, tmp_path: Path
) -> None:
    cfg = searched(kind, tiny_dir, tmp_path, **options)
    assert not AdaptiveSettings.from_cfg(cfg).searches
    by_found = set_up(adaptive_recipe(kind), cfg)
    options = short(options)
    options["adaptive"] = options["adaptive"] | {"search_only": False}
    searching = set_up(adaptive_recipe(kind), tiny_config(kind, shallow_assets(tiny_dir), tmp_path / "s", **options))
    sizes = [
        (one.trainer.loader.batch_size, one.trainer.micro_batches.limit, one.trainer.loader.steps_per_epoch)
        for one in (by_found, searching)
    ]
    assert sizes[0] == sizes[1]
    steps, _ = trained(by_found)
    assert [step["step"] for step in steps] == [1, 2]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:There are fewer total steps:UserWarning")  # two PPO turns, on purpose
def test_both_sizes_of_ppo_are_found(tiny_dir: Path, tmp_path: Path) -> None:
    from adaptive_ppo_full_finetune_single_device import AdaptivePPOFullFinetuneRecipeSingleDevice as Recipe

    adaptive = {"memory_limit": LIMIT_BYTES, "margin": 0.0, "search_only": True}
    cfg = ppo_config(ppo_assets(tiny_dir), tmp_path, use_maximum_batch_size=True, adaptive=adaptive)
    with pytest.raises(RunEnded):
        set_up(Recipe, cfg)
    found = load_config(str(tmp_path / "found.yaml"))
    only, *searches = lines_in(tmp_path)
    assert only["event"] == "search only"
    sizes = {name: size for search in searches for name, size in search["chosen"].items()}
    assert {name: found[name] for name in sizes} == sizes == {"forward_batch_size": 6, "gradient_accumulation_steps": 6}
    assert not AdaptiveSettings.from_cfg(found).searches


# ---- the command


class Launch:
    """Replaces a launch: records its arguments, and creates the config file that a search writes."""

    def __init__(self) -> None:
        self.finds = True
        self.status = 0
        self.launched: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> None:
        self.launched.append(list(arguments))
        if self.status:
            raise SystemExit(self.status)
        if self.finds:
            place = arguments.index("--config")
            cfg = load_config(arguments[place + 1], arguments[place + 2 :])
            path = Path(cfg.output_dir) / "found.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    fake = Launch()
    monkeypatch.setattr(search, "_tune_run", fake)
    return fake


@pytest.mark.parametrize("recipe", [RECIPE, "my_recipe.py", "folder/my_recipe"])
def test_the_last_line_is_the_command_that_trains_with_the_found_config(
    recipe: str, launch: Launch, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for copy in ("my_recipe.py", "folder/my_recipe.py"):
        Path(copy).parent.mkdir(exist_ok=True)
        Path(copy).touch()
    output_dir = tmp_path / "it's an output"
    torchrun = ["--nnodes", "1", "--nproc_per_node", "2", "--rdzv_conf", "join_timeout=9,a=b c"]
    given = [recipe, "--config", "tiny/full", f"output_dir={output_dir}", "epochs=1"]
    ended = program("search", *torchrun, *given)
    assert ended.status == 0
    assert launch.launched == [[*torchrun, *given, "use_maximum_batch_size=True", "adaptive.search_only=True"]]
    assert shlex.split(ended.out.splitlines()[-1]) == [
        "tune",
        "run",
        *torchrun,
        recipe,
        "--config",
        str(output_dir / "found.yaml"),
    ]


def test_a_token_budget_is_searched_for_instead_of_the_batch_size(
    launch: Launch, tmp_path: Path, program: Program
) -> None:
    given = [RECIPE, "--config", "tiny/full", f"output_dir={tmp_path}", "adaptive.max_tokens_per_micro_batch=auto"]
    assert program("search", *given).status == 0
    assert launch.launched == [[*given, "adaptive.search_only=True"]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("full_finetune_distributed", "--config", "tiny/full"),
            "A search needs an adaptive recipe, or a copy as in my_recipe.py, not 'full_finetune_distributed'; did you"
            " mean `adaptive_full_finetune_distributed`?",
        ),
        (("./my_recipe.py", "--config", "tiny/full"), "A search needs an adaptive recipe, or a copy as in "),
        (("gone.py", "--config", "tiny/full"), "A search needs an adaptive recipe, or a copy as in "),
        (("--config", "tiny/full", RECIPE), "A search needs a recipe, followed by `--config` and"),
        ((RECIPE, "epochs=1", "--config", "tiny/full"), "Overrides come after `--config` and its config: 'epochs=1'"),
        (
            ("--nproc_per_node", "two", RECIPE, "--config", "tiny/full"),
            "`--nproc_per_node` 'two' is no number of ranks here.",
        ),
        (
            ("--nproc_per_node", "2", "adaptive_full_finetune_single_device", "--config", "tiny/full"),
            "`--nproc_per_node` must be 1 for a single-device recipe, but is 2 instead.",
        ),
        ((RECIPE, "--config"), "`--config` needs the name or path of a config."),
        ((RECIPE, "--config", "tiny/full", "adaptive.margn=0.1"), "`adaptive` has no key 'margn'; did you mean"),
        (
            (RECIPE, "--config", "tiny/full", "adaptive.lr_scaling=sqrt"),
            "`adaptive.search_only: True` cannot be combined with `adaptive.lr_scaling: sqrt`",
        ),
        ((RECIPE, "--config", "tiny/full", "output_dir=null"), "`output_dir` must be a folder, but is None instead."),
        ((RECIPE, "--config", "my_config.yaml"), "A search needs an `output_dir`."),
        ((RECIPE, "--config", "tiny/full", "output_dir=/proc/x"), "`output_dir` cannot be written"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_sentence_before_anything_runs(
    arguments: tuple[str, ...],
    sentence: str,
    launch: Launch,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_recipe.py").touch()
    Path("my_config.yaml").write_text("batch_size: 2\n")
    program.refuses("search", *arguments, sentence=f": {sentence}")
    assert launch.launched == []


@pytest.mark.parametrize("status", [0, 1])
def test_where_no_config_was_written_no_command_is_printed_and_the_older_config_is_gone(
    status: int, launch: Launch, tmp_path: Path, program: Program
) -> None:
    (tmp_path / "found.yaml").touch()
    launch.finds, launch.status = False, status
    assert program("search", RECIPE, "--config", "tiny/full", f"output_dir={tmp_path}") == Ended(status, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("code", "status"), [(None, 0), (75, 75)])
def test_on_one_device_the_run_is_in_this_process(
    code: int | None, status: int, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_module(name: str, **_: Any) -> NoReturn:
        run.append([name, *sys.argv])
        sys.exit(code)

    run: list[list[str]] = []
    monkeypatch.setattr("runpy.run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["tune-adaptive"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    recipe = "adaptive_full_finetune_single_device"
    assert program("search", recipe, "--config", "tiny/full", f"output_dir={tmp_path}").status == status
    (((name, first, *arguments)),) = run
    assert (name, first, arguments[:1]) == (recipe, recipe, ["--config"])
    assert arguments[2:] == [f"output_dir={tmp_path}", "use_maximum_batch_size=True", "adaptive.search_only=True"]


# ---- with real processes


@pytest.mark.exhaustive
def test_two_ranks_search_and_the_printed_command_trains_with_that_size(tiny_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out dir"
    given = ["--nproc_per_node", "2", RECIPE, "--config", "tiny/full", f"tiny_dir={tiny_dir}", f"output_dir={out}"]
    command = [sys.executable, "-m", "torchtune_adaptive.cli", "search", *given, *SHORT]
    searching = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600)
    errors = searching.stderr
    assert searching.returncode == 0, errors[-3000:]
    assert errors.count(f"{RECIPE}: the search found batch_size ") == 1
    assert not list(out.glob("epoch_*"))
    found = load_config(str(out / "found.yaml")).batch_size
    assert events_in(out, "search")[0]["batch_size"] == found >= 4
    tune, run, *command = shlex.split(searching.stdout.splitlines()[-1])
    assert (tune, run) == ("tune", "run")
    training = tune_run(*command, directory=tmp_path)
    assert training.returncode == 0, training.stderr[-3000:]
    assert "Probes, with the figures of rank 0" in errors
    assert "Probes, with the figures of rank 0" not in training.stderr
    state = read_checkpoint(out / "epoch_0").state
    assert state is not None
    assert (state.batch_size, state.global_step) == (found, 2)

"""`tune-adaptive fastest` leaves the config that trains fastest, and says how to train with it."""

import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.support.checkout import environment
from tests.support.full_disk import FullDisk
from tests.support.program import Program
from tests.support.recipe_runs import SHALLOW, adaptive_recipe, finished, shallow_assets, tiny_config
from tests.support.toys import search_result
from torchtune_adaptive.cli import fastest
from torchtune_adaptive.engine.search.timing import Timing
from torchtune_adaptive.errors import NOTHING_FITS_ADVICE
from torchtune_adaptive.fastest import set_up
from torchtune_adaptive.report.read import Search
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import load_config
from torchtune_adaptive.training.run_log import RunLog

RECIPE = "adaptive_full_finetune_single_device"
CHECKPOINTED = "enable_activation_checkpointing=True"


class SetUps:
    """Takes the place of the processes: each finds a batch of 8, and times it by whether it recomputes activations."""

    def __init__(self) -> None:
        self.rates: dict[bool, int] = {True: 100, False: 150}
        self.launched: list[list[str]] = []
        self.configs: list[Any] = []
        self.stops_at: int | None = None
        self.fails_with = ""
        self.fails_from: int | None = None  # a launch
        self.logs_no_search_from: int | None = None  # a launch
        self.seconds: tuple[float, ...] = (1.0,)
        self.rows: Iterator[int] = itertools.repeat(8)

    def __call__(self, arguments: Sequence[str], log: Any) -> int:
        self.launched.append(list(arguments))
        cfg = OmegaConf.load(arguments[-1])
        self.configs.append(cfg)
        if self.stops_at == len(self.launched):
            raise KeyboardInterrupt
        if self.fails_with or (self.fails_from is not None and len(self.launched) >= self.fails_from):
            log.write(f"W1128 torch: noise\n{RECIPE}: {self.fails_with or 'it failed'}.\nmore noise\n")
            return 1
        rate = self.rates[cfg.enable_activation_checkpointing]
        folder = Path(cfg.output_dir)
        run_log = RunLog(folder, writes=True)
        run_log.begin(step=0, search_only=True)
        timings = {"4 rows": Timing(self.seconds, 50), "8 rows": Timing(self.seconds, rate)}
        if self.logs_no_search_from is None or len(self.launched) < self.logs_no_search_from:
            run_log.search(search_result(), step=0, seq_len=64, timings=timings)
        found = OmegaConf.merge(
            cfg, {"batch_size": next(self.rows), "use_maximum_batch_size": False, "adaptive": {"objective": "memory"}}
        )
        (folder / "found.yaml").write_text(OmegaConf.to_yaml(found))
        return 0


@pytest.fixture
def set_ups(monkeypatch: pytest.MonkeyPatch) -> SetUps:
    fake = SetUps()
    monkeypatch.setattr(set_up, "_run", fake)
    monkeypatch.setattr(fastest, "planned_rows", lambda cfg, ranks, search: 20)
    return fake


def given(output_dir: Path, *more: str) -> list[str]:
    return [RECIPE, "--config", "tiny/full", f"output_dir={output_dir}", *more]


def test_the_fastest_config_and_the_command_that_trains_with_it_are_left(
    set_ups: SetUps, tmp_path: Path, program: Program
) -> None:
    arguments = given(tmp_path, CHECKPOINTED, "batch_size=4", "gradient_accumulation_steps=2")
    ended = program("fastest", "--try", "checkpointing", *arguments)
    assert (ended.status, ended.err) == (0, "")
    assert shlex.split(ended.out.splitlines()[-1]) == [
        *("tune", "run", RECIPE, "--config", str(tmp_path / "found.yaml"))
    ]
    found = load_config(str(tmp_path / "found.yaml"))
    assert (found.enable_activation_checkpointing, found.batch_size) == (False, 8)
    assert (found.output_dir, found.adaptive.global_batch_size) == (str(tmp_path), 8)  # 4 rows in 2 micro-steps
    assert not AdaptiveSettings.from_cfg(found).searches
    cells = [line.split() for line in ended.out.splitlines()]
    assert ["as", "it", "is", "4", "rows", "50", "1.00"] in cells
    assert ["no", "checkpointing", "8", "rows", "150", "3.00", "0", "B", "13", "20", "yes"] in cells


def test_each_set_up_has_the_users_config_but_for_what_is_tried(
    set_ups: SetUps, tmp_path: Path, program: Program
) -> None:
    program("fastest", "--try", "checkpointing", *given(tmp_path, CHECKPOINTED, "seed=7"))
    settings = [AdaptiveSettings.from_cfg(cfg) for cfg in set_ups.configs]
    assert [one.global_batch_size for one in settings] == [4, 4]
    assert all(one.use_maximum_batch_size and one.objective == "speed" for one in settings)
    assert [cfg.enable_activation_checkpointing for cfg in set_ups.configs] == [True, False]
    assert [cfg.seed for cfg in set_ups.configs] == [7, 7]
    assert len({cfg.output_dir for cfg in set_ups.configs} | {str(tmp_path)}) == 3


def test_options_of_torchrun_are_passed_on_and_count_the_samples(
    set_ups: SetUps, tmp_path: Path, program: Program
) -> None:
    recipe, *more = given(tmp_path, CHECKPOINTED)
    recipe = "adaptive_full_finetune_distributed"
    ended = program("fastest", "--minutes", "9", "--nproc_per_node", "2", recipe, *more)
    assert ended.status == 0
    assert [arguments[:3] for arguments in set_ups.launched] == [["--nproc_per_node", "2", recipe]] * len(
        set_ups.launched
    )
    assert {cfg.adaptive.global_batch_size for cfg in set_ups.configs} == {8}
    assert shlex.split(ended.out.splitlines()[-1])[2:5] == ["--nproc_per_node", "2", recipe]


def test_if_it_is_stopped_the_best_so_far_is_kept(set_ups: SetUps, tmp_path: Path, program: Program) -> None:
    set_ups.stops_at = 2
    ended = program("fastest", *given(tmp_path, CHECKPOINTED))
    assert ended.status == 0
    assert "Stopped before all was tried" in ended.out
    assert load_config(str(tmp_path / "found.yaml")).enable_activation_checkpointing
    set_ups.stops_at = 3  # while the first set-up runs: nothing is known
    ended = program("fastest", *given(tmp_path, CHECKPOINTED))
    assert (ended.status, ended.err) == (1, "tune-adaptive fastest: stopped before the config as it is was timed.\n")
    assert not (tmp_path / "found.yaml").exists()


def test_the_config_that_is_left_is_that_of_the_outcome_also_if_it_is_measured_again_in_vain(
    set_ups: SetUps, tmp_path: Path, program: Program
) -> None:
    set_ups.seconds = (1.0, 1.5)  # they vary, so that the best two are measured again
    set_ups.rows = itertools.chain((8, 8), itertools.repeat(4))
    set_ups.fails_from = 4
    ended = program("fastest", "--try", "checkpointing", *given(tmp_path, CHECKPOINTED))
    assert (ended.status, len(set_ups.launched)) == (0, 4)
    assert load_config(str(tmp_path / "found.yaml")).batch_size == 8


def test_a_folder_that_cannot_be_written_is_said(set_ups: SetUps, tmp_path: Path, program: Program) -> None:
    (tmp_path / "fastest").write_text("not a folder")
    ended = program("fastest", *given(tmp_path))
    assert ended.status == 1
    assert ended.err.startswith(
        "tune-adaptive fastest: The config cannot be timed as it is: `output_dir` cannot be written: folder "
    )
    assert ended.err.count("\n") == 1


def test_what_was_found_is_printed_also_if_the_config_with_it_cannot_be_written(
    set_ups: SetUps, tmp_path: Path, program: Program
) -> None:
    with FullDisk(fastest, "write_atomically"):
        ended = program("fastest", "--try", "checkpointing", *given(tmp_path, CHECKPOINTED))
    assert ended.status == 1
    assert re.search(r"^no checkpointing +8 rows .* yes$", ended.out, re.M)
    assert ended.err == (
        f"tune-adaptive fastest: `output_dir` cannot be written: folder '{tmp_path}': No space left on device.\n"
    )


def test_a_set_up_whose_log_was_lost_costs_only_itself(set_ups: SetUps, tmp_path: Path, program: Program) -> None:
    """As on a disk that was full for a while."""
    set_ups.logs_no_search_from = 2
    ended = program("fastest", "--try", "checkpointing", *given(tmp_path, CHECKPOINTED))
    assert ended.status == 0
    assert f"- no checkpointing: The log in {tmp_path / 'fastest' / '1'} has no search\n" in ended.out
    assert load_config(str(tmp_path / "found.yaml")).enable_activation_checkpointing


def test_lost_output_does_not_end_the_search(tmp_path: Path) -> None:
    """The config with what was found is what counts."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.cli.test_fastest_command import SetUps, given\n"
        "from torchtune_adaptive.cli import fastest, main\nfrom torchtune_adaptive.fastest import set_up\n"
        "set_up._run, fastest.planned_rows = SetUps(), lambda *_: 20\n"
        "main(['fastest', '--try', 'checkpointing', *given(Path(sys.argv[1]))])"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], env=environment(), stdout=full, stderr=subprocess.PIPE
        )
    assert (ended.returncode, (tmp_path / "found.yaml").exists()) == (0, True), ended.stderr
    assert b"Standard output cannot be written: No space left on device." in ended.stderr


def test_why_the_config_as_it_is_cannot_run_is_said(set_ups: SetUps, tmp_path: Path, program: Program) -> None:
    set_ups.fails_with = "`seed` must be an integer"
    ended = program("fastest", *given(tmp_path))
    assert ended.status == 1
    assert ended.err == "tune-adaptive fastest: The config cannot be timed as it is: `seed` must be an integer.\n"
    set_ups.fails_with = f"not even one row fits; {NOTHING_FITS_ADVICE}"
    ended = program("fastest", *given(tmp_path))
    sentence = (
        "The config cannot be timed as it is, nor with all layers checkpointed, nor with loss in 32 chunks: not even"
        " one row fits; "
    )
    assert ended.err == f"tune-adaptive fastest: {sentence}{NOTHING_FITS_ADVICE}.\n"
    assert [cfg.enable_activation_checkpointing for cfg in set_ups.configs] == [False, False, True, False]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--minutes", "0", RECIPE, "--config", "tiny/full"), "`--minutes` must be above 0, but is 0 instead."),
        (("--minutes", "two", RECIPE, "--config", "tiny/full"), "`--minutes` must be a number, but is 'two' instead."),
        (
            ("--try", "checkpointing,packing", RECIPE, "--config", "tiny/full"),
            "`--try` must be one of checkpointing, compile, resharding, loss, but is 'packing' instead.",
        ),
        (
            (RECIPE, "--config", "tiny/full", "adaptive.max_tokens_per_micro_batch=512"),
            "`fastest` chooses rows or tokens itself: leave `adaptive.max_tokens_per_micro_batch: 512` out.",
        ),
        (
            (RECIPE, "--config", "tiny/full", "adaptive.lr_scaling=sqrt"),
            "`fastest` keeps the samples of a step: leave `adaptive.lr_scaling: sqrt` out.",
        ),
        (
            (RECIPE, "--config", "llama3_2/1B_full_single_device"),
            "`fastest` cuts a step into micro-batches: it needs `optimizer_in_bwd: False`.",
        ),
        (
            ("adaptive_ppo_full_finetune_single_device", "--config", "mistral/7B_full_ppo_low_memory"),
            "`fastest` cannot time the steps of PPO: use `tune-adaptive search`.",
        ),
        (
            ("--nnodes", "2", "adaptive_full_finetune_distributed", "--config", "tiny/full"),
            "`--nnodes` must be 1 for `fastest`, which times a single machine, but is '2' instead.",
        ),
        (
            ("--nproc_per_node", "two", "adaptive_full_finetune_distributed", "--config", "tiny/full"),
            "`--nproc_per_node` 'two' is no number of ranks here.",
        ),
        (
            ("--nproc_per_node", "0", "adaptive_full_finetune_distributed", "--config", "tiny/full"),
            "`--nproc_per_node` must be at least 1, but is 0 instead.",
        ),
        ((RECIPE, "--config", "tiny/full", "~batch_size"), "`batch_size` must be an integer, but is None instead."),
        (
            (RECIPE, "--config", "tiny/full", "gradient_accumulation_steps=x"),
            "`gradient_accumulation_steps` must be an integer, but is 'x' instead.",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    arguments: tuple[str, ...], sentence: str, set_ups: SetUps, program: Program
) -> None:
    program.refuses("fastest", *arguments, sentence=f": {sentence}")
    assert set_ups.launched == []


# ---- what is really found


@pytest.mark.slow
@pytest.mark.parametrize(("limit_bytes", "fits"), [(2**30, True), (2**20, False)])
def test_the_plan_has_the_rows_and_the_limit_of_the_first_search(
    limit_bytes: int, fits: bool, tiny_dir: Path, tmp_path: Path
) -> None:
    cfg = tiny_config("full_single", tiny_dir, tmp_path, model__num_layers=1, adaptive={"global_batch_size": 8})
    searched = Search("", search_result(memory_limit_bytes=limit_bytes), 64, {}, {})
    planned = fastest.planned_rows(cfg, 1, searched)
    assert planned is not None
    assert (planned > 0) == fits


@pytest.mark.exhaustive
def test_what_is_found_trains_as_the_config_does_and_faster(tiny_dir: Path, tmp_path: Path) -> None:
    assets = shallow_assets(tiny_dir)
    own = {"epochs": 1, "max_steps_per_epoch": 20, "batch_size": 1, "gradient_accumulation_steps": 16}
    options = SHALLOW | own | {"enable_activation_checkpointing": True, "adaptive": {"memory_limit": "2GiB"}}
    cfg = tiny_config("full_single", assets, tmp_path / "out", **options)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    command = [sys.executable, "-m", "torchtune_adaptive.cli", "fastest", "--try", "checkpointing"]
    command += [RECIPE, "--config", str(tmp_path / "config.yaml")]
    subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, check=True)
    found = load_config(str(tmp_path / "out" / "found.yaml"))
    assert (found.batch_size, found.adaptive.get("max_tokens_per_micro_batch")) != (1, None)
    recipe = adaptive_recipe("full_single")
    losses = [[step["loss"] for step in finished(recipe, one)[0]] for one in (cfg, found)]
    assert len(losses[0]) == 20
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)

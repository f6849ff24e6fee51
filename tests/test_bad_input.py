"""Each bad input is refused by all ranks with one sentence that quotes it, before any training."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.recipe_runs import SHALLOW, RecordingLogger, adaptive_recipe, set_up, shallow_assets, tiny_config
from tests.test_tune_run import tune_run
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import named_by_path
from torchtune_adaptive.stock.configs import resolve_config_argument

SEARCH = "use_maximum_batch_size=True"
GROW = "batch_increase_function="
FUNCTION = "`batch_increase_function` must "
CASES: dict[str, tuple[list[str], str]] = {
    "misspelt key": ([SEARCH, "adaptive.margn=0.1"], "but is 'margn' instead; did you mean `adaptive.margin`?"),
    "misspelt top-level key": (["use_max_batch_size=True"], "did you mean `use_maximum_batch_size`?"),
    "key in the wrong place": ([SEARCH, "memory_limit=64MiB"], "did you mean `adaptive.memory_limit`?"),
    "unknown strategy": (
        [SEARCH, "adaptive.strategy=bisect"],
        "`adaptive.strategy` must be one of linear_extrapolation,",
    ),
    "margin above one": ([SEARCH, "adaptive.margin=1.5"], "`adaptive.margin` must be in [0, 1), but is 1.5 instead."),
    "margin below zero": (
        [SEARCH, "adaptive.margin=-0.1"],
        "`adaptive.margin` must be in [0, 1), but is -0.1 instead.",
    ),
    "unreadable limit": (
        [SEARCH, "adaptive.memory_limit=80bananas"],
        "must be a size like 80GiB or whole bytes, but is",
    ),
    "limit of zero": (
        [SEARCH, "adaptive.memory_limit=0GiB"],
        "`adaptive.memory_limit` must be at least one byte, but is '0GiB'",
    ),
    "limit above the device": (
        [SEARCH, "adaptive.memory_limit=900TiB"],
        "`adaptive.memory_limit` must be at most what the device",
    ),
    "CPU search without limit": (
        [SEARCH, "adaptive.memory_limit=null"],
        "`adaptive.memory_limit` must be given for a search on",
    ),
    "max_batch_size of zero": (
        [SEARCH, "adaptive.max_batch_size=0"],
        "`adaptive.max_batch_size` must be at least 1, but is 0",
    ),
    "function not importable": ([GROW + "no_such_module.grow"], FUNCTION + "be importable, but 'no_such_module.grow'"),
    "function not callable": ([GROW + "tests.growth_functions.NOT_CALLABLE"], "is 3 instead."),
    "function of one argument": (
        [GROW + "tests.growth_functions.takes_one"],
        FUNCTION + "take two positional arguments",
    ),
    "function that raises": ([GROW + "tests.growth_functions.raises_late"], "ZeroDivisionError: division by zero."),
    "function giving a float": ([GROW + "tests.growth_functions.gives_float"], "gives_float returned 0.5 at epoch 0"),
    "function giving None": ([GROW + "tests.growth_functions.gives_none"], "gives_none returned None at epoch 0"),
    "function giving a negative": ([GROW + "tests.growth_functions.gives_negative"], "returned -4 at epoch 0"),
    "function giving a bool": ([GROW + "tests.growth_functions.gives_bool"], "gives_bool returned True at epoch 0"),
    "optimizer in backward": (
        [
            GROW + "tests.growth_functions.gives_two",
            "adaptive.growth_limit=none",
            "optimizer_in_bwd=True",
            "clip_grad_norm=null",
        ],
        "`optimizer_in_bwd` must be False with `adaptive.growth_limit` none, but is True instead.",
    ),
    "tensor parallelism": (
        [SEARCH, "tensor_parallel_dim=2"],
        "`tensor_parallel_dim` must be 1 for a batch size search, but is 2 instead.",
    ),
    "compiled code on the CPU": ([SEARCH, "compile=True"], "`compile` must be False for a search on the CPU"),
    "data below one batch": (["batch_size=64", "dataset.split=train[:100]"], "64 rows * 1 micro-steps * 2 ranks = 128"),
    "data below one row a micro-step": (
        [SEARCH, "gradient_accumulation_steps=64", "dataset.split=train[:100]"],
        "`dataset` must fill an optimizer step (1 rows * 64 micro-steps * 2 ranks = 128 samples per optimizer step),"
        " but has 100 samples.",
    ),
    "data set without samples": (["dataset._component_=tests.recipe_runs.no_samples"], "must have samples, but has 0."),
    "empty split": (["dataset.split=train[:0]"], "`dataset` must be loadable and not empty, but failed: ValueError:"),
    "empty data file": (
        ["dataset.data_files=EMPTY_FILE"],
        "must be loadable and not empty, but failed: StopIteration.",
    ),
    "no data file": (["dataset.data_files=/no/such.json"], "not empty, but failed: FileNotFoundError: Unable to find"),
    "samples of another method": (
        [
            "dataset._component_=torchtune.datasets.preference_dataset",
            "dataset.data_files=${tiny_dir}/preferences.json",
        ],
        "must have samples with tokens, labels, but its first one has chosen_input_ids, chosen_labels, rejected_input",
    ),
    "column that is not there": (
        ["dataset.column_map={input: nope, output: output}"],
        "`dataset` must have samples, but loading the first one failed: KeyError: 'nope'.",
    ),
    "no checkpoint": (
        ["checkpointer.checkpoint_dir=/no/such"],
        "`checkpointer.checkpoint_dir` must exist, but is '/no/such' instead.",
    ),
    "loss of another method": (
        ["loss._component_=torchtune.rlhf.loss.DPOLoss"],
        "can set up, but failed: AttributeError: 'DPOLoss' object has no attribute 'ignore_index' (",
    ),
    "no micro-steps": (
        ["gradient_accumulation_steps=0"],
        "`gradient_accumulation_steps` must be at least 1, but is 0 instead.",
    ),
    "no rows": (["batch_size=two"], "`batch_size` must be an integer, but is 'two' instead."),
    "rows beyond the model": (
        [SEARCH, "tokenizer.max_seq_len=600"],
        "max_seq_len (512 tokens), but have 600; set `tokenizer.max_seq_len` to 512 or less.",
    ),
    "probes beyond the model": (
        [SEARCH, "adaptive.seq_len=513"],
        "max_seq_len (512 tokens), but have 513; set `adaptive.seq_len` to 512 or less.",
    ),
    "start above the maximum": (
        [GROW + "tests.growth_functions.gives_two", "batch_size=64", "adaptive.memory_limit=44MiB"],
        "`batch_size` must be at most the largest that fits (3), but is 64 instead.",
    ),
    "nothing fits": ([SEARCH, "adaptive.memory_limit=9MiB"], "not even one row fits: its step ran out of memory at"),
    "nothing fits before the first forward": ([SEARCH, "adaptive.memory_limit=1MiB"], "not even one row fits:"),
    "start above the bound": (
        [GROW + "tests.growth_functions.gives_two", "batch_size=8", "adaptive.max_batch_size=4"],
        "at most the largest that the data set and max_batch_size allow (4), but is 8 instead.",
    ),
    "fewer samples than ranks": (
        ["adaptive.global_batch_size=1"],
        "`adaptive.global_batch_size` must be at least the number of ranks (2), but is 1 instead.",
    ),
    "data below a global batch": (
        ["adaptive.global_batch_size=401"],
        "`dataset` must fill an optimizer step (401 samples per optimizer step on 2 ranks), but has 400 samples.",
    ),
    "search on data below a global batch": (
        [SEARCH, "adaptive.global_batch_size=401", "adaptive.max_batch_size=1"],
        "but has 400 samples.",
    ),
    "global batch in backward": (
        ["adaptive.global_batch_size=8", "optimizer_in_bwd=True", "clip_grad_norm=null"],
        "`optimizer_in_bwd` must be False with `adaptive.global_batch_size` 8, but is True instead.",
    ),
    "global batch that memory bounds": (
        [GROW + "tests.growth_functions.gives_two", "adaptive.global_batch_size=8"],
        "`adaptive.growth_limit` must be none or a number where `adaptive.global_batch_size` grows,",
    ),
    "tokens of packs": (
        ["adaptive.max_tokens_per_micro_batch=512", "dataset.packed=True"],
        "`dataset.packed` must be False for `adaptive.max_tokens_per_micro_batch`,",
    ),
    "sample above the tokens": (
        ["adaptive.max_tokens_per_micro_batch=128"],
        "`adaptive.max_tokens_per_micro_batch` must be at least every sample's length, but is 128, and sample ",
    ),
    "throughput of nothing": (
        ["adaptive.objective=throughput"],
        "`use_maximum_batch_size` must be True for the objective throughput,",
    ),
    "unknown scaling": (
        ["adaptive.lr_scaling=root"],
        "`adaptive.lr_scaling` must be one of none, sqrt, linear, but is 'root' instead.",
    ),
    "checkpoints in the background": (
        ["enable_async_checkpointing=True"],
        "`enable_async_checkpointing` must be False on 2 CPU ranks,",
    ),
    "misspelt key of torchtune": (["epoch=5"], "but is 'epoch' instead; did you mean `epochs`?"),
    "no epochs": (["epochs=-1"], "`epochs` must be at least 1, but is -1 instead."),
    "no tokenizer": (["tokenizer.path=/no/such"], "`tokenizer.path` must exist, but is '/no/such' instead."),
    "no file of the checkpoint": (
        ["checkpointer.checkpoint_files=[model.pt, none.pt]"],
        "but 'none.pt' is not one.",
    ),
    "learning rate in words": (["optimizer.lr=fast"], "`optimizer.lr` must be a number, but is 'fast' instead."),
    "warmup in words": (["lr_scheduler.num_warmup_steps=x"], "`lr_scheduler.num_warmup_steps` must be a number,"),
    "values that an optimizer refuses": (
        ["optimizer.betas=[2, 3]"],
        "`optimizer` must be one that can be created, but failed with {",
    ),
    "component of no module": (
        ["loss._component_=nonsense.Foo"],
        "`loss._component_` must be importable, but 'nonsense.Foo' is not: ModuleNotFoundError",
    ),
    "state that cannot be saved": (
        [GROW + "tests.growth_functions.UNSAVABLE"],
        "`batch_increase_function.state_dict()` must return JSON values, but fails: TypeError",
    ),
}


def _with_empty_file(overrides: list[str], directory: Path) -> list[str]:
    (directory / "empty.json").write_text("")
    return [override.replace("EMPTY_FILE", str(directory / "empty.json")) for override in overrides]


def _answers(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, str]:
    """The refusal of each case on this rank; no set-up may succeed."""
    from omegaconf import OmegaConf

    answers: dict[str, str] = {}
    for name, (overrides, _) in CASES.items():
        cfg: Any = tiny_config("full", tiny_dir, output_dir, **SHALLOW)
        cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist(_with_empty_file(overrides, output_dir)))
        RecordingLogger()
        try:
            with named_by_path():
                set_up(adaptive_recipe("full"), cfg)
        except InputError as error:
            answers[name] = str(error)
        assert RecordingLogger.last.steps == [], "no step may be taken before a refusal"
    return answers


@pytest.fixture(scope="module")
def answers(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_on_ranks(_answers, 2, shallow_assets(tiny_dir), tmp_path_factory.mktemp("bad_input"))


@pytest.mark.parametrize("case", list(CASES))
def test_a_bad_input_is_refused_by_every_rank_with_one_sentence(case: str, answers: list[dict[str, str]]) -> None:
    expected = CASES[case][1]
    assert expected in answers[0].get(case, "not refused")
    assert answers[0][case] == answers[1][case]
    assert "\n" not in answers[0][case]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", list(CASES))
def test_a_bad_input_ends_tune_run_with_its_sentence_printed_once(case: str, tiny_dir: Path, tmp_path: Path) -> None:
    overrides, expected = CASES[case]
    run = tune_run(
        "--nproc_per_node",
        "2",
        "adaptive_full_finetune_distributed",
        "--config",
        "tiny/full",
        f"tiny_dir={shallow_assets(tiny_dir)}",
        *(f"{key.replace('__', '.')}={value}" for key, value in SHALLOW.items()),
        f"output_dir={tmp_path / 'out'}",
        *_with_empty_file(overrides, tmp_path),
        directory=tmp_path,
    )
    assert run.returncode != 0
    (said,) = re.findall("adaptive_full_finetune_distributed: .*", run.stderr)  # also behind a progress bar
    assert expected in said
    assert expected in run.stderr.splitlines()[-2]  # torchrun's report, and below it a line of "="
    assert "|Loss: " not in run.stderr
    print(said)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["key=value"], "`--config` must be followed by the name or path of a config, but is missing."),
        (["--config", "no/such.yaml"], "`--config` must be the name or path of a config, but is 'no/such.yaml'."),
        (["--config", "BROKEN"], "must be a YAML file, but"),
        (["--config", "LIST"], "must be a YAML mapping, but"),
        (
            ["--config", "tiny/full", "batch_size"],
            "An override must have the form key=value, but is 'batch_size' instead.",
        ),
        (["--config", "tiny/full", "--seed=1"], "must have the form key=value, but is '--seed=1' instead."),
        (["--config", "tiny/full", "~model"], "Overrides must fit the config, but '~model' do not:"),
        (["--config", "tiny/full", "model.layers=[1, 2"], "but 'model.layers=[1, 2' do not:"),
        (["--config", "tiny/full", "seed=${nosuch}"], "The config must be complete, but is not: Interpolation"),
        (["--config", "TWICE"], "found duplicate key"),
        (["--config", "a\0b"], "must be a YAML file, but 'a\\x00b' is not: ValueError: embedded null byte."),
        (["--config", "a" * 5000], "File name too long"),
        (["--config", "DEEP"], "RecursionError"),
    ],
)
def test_a_command_line_that_names_no_config_is_refused(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: [1, 2\nb: }")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    (tmp_path / "twice.yaml").write_text("a: 1\na: 2\n")
    (tmp_path / "deep.yaml").write_text("[" * 3000)
    files = {name.upper(): str(tmp_path / f"{name}.yaml") for name in ("broken", "list", "twice", "deep")}
    with pytest.raises(InputError) as refusal:
        resolve_config_argument([files.get(argument, argument) for argument in arguments])
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_config_is_found_by_adaptive_name_stock_name_or_path(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("batch_size: 2\n")
    names = ["tiny/full", "llama3_1/8B_lora", str(tmp_path / "mine.yaml")]
    paths = [Path(resolve_config_argument(["--config", name, "a=b"])[1]) for name in names]
    assert [path.name for path in paths] == ["full.yaml", "8B_lora.yaml", "mine.yaml"]
    assert all(path.is_file() for path in paths)


def test_help_is_left_to_torchtunes_parser() -> None:
    assert resolve_config_argument(["--config", "tiny/full", "--help"])[2] == "--help"

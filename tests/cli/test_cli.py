"""`tune-adaptive` with a fake in place of traced steps: what it prints, and what it refuses."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.support.plans import GIB, MIB, rows_of, step_of, tables
from tests.support.program import Program
from torchtune_adaptive.plan import ways
from torchtune_adaptive.plan.gpu import Card, memory_of
from torchtune_adaptive.plan.host_memory import HostFigures
from torchtune_adaptive.plan.show import plot
from torchtune_adaptive.plan.trace import config_steps
from torchtune_adaptive.plan.trace.step_events import TracedStep

FULL = ("plan", "--config", "tiny/full")
CUDA = ("device=cuda", "adaptive.memory_limit=null")  # as the stock configs are


class FakeTracing:
    """For any config, a step that holds ``held_gib`` and 2 MiB for each token. Remembers its requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.held_gib = 2
        self.host = HostFigures()

    def trace_config(self, cfg: DictConfig, *, seq_lens: list[int], **asked: Any) -> TracedStep:
        self.requests.append({"config": cfg, "seq_lens": seq_lens, **asked})
        lengths = (
            rows_of(seq_len, held_bytes=self.held_gib * GIB, bytes_per_row=2 * MIB * seq_len) for seq_len in seq_lens
        )
        return step_of(*lengths, host=self.host)

    @property
    def only(self) -> dict[str, Any]:
        (request,) = self.requests
        return request


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTracing:
    """Replaces what traces; the rest of the program is real, and its cache of traces is empty."""
    fake = FakeTracing()
    monkeypatch.setattr(config_steps, "trace_config", fake.trace_config)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


# ---- plan


def test_a_plan_is_printed_as_tables(program: Program, tracing: FakeTracing) -> None:
    ended = program(*FULL, "--memory", "80GiB", "--seq-len", "1024,4096", "adaptive.power_of_two=False")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("tiny/full: ")
    sizes = tables(ended.out)[0]
    # the step holds 2 GiB, and the config's limit is 512 MiB
    assert [row[:4] for row in sizes[1:]] == [["1024", "0", "0", "(4)"], ["4096", "0", "0", "(4)"]]
    assert tracing.requests[0]["seq_lens"] == [1024, 4096]


def test_batches_that_are_asked_for_are_planned_from_the_same_trace(program: Program, tracing: FakeTracing) -> None:
    arguments = (*FULL, "--memory", "80GiB", "--seq-len", "1024", "--batch-size", "1,40", *CUDA)
    asked = tables(program(*arguments).out)[1]
    assert [row[1:3] for row in asked] == [["batch", "fits"], ["1", "fits"], ["40", "does not fit"]]
    ended = program(*arguments, "--json")
    content = json.loads(ended.out)
    assert (ended.status, ended.err) == (0, "")
    assert [size["batch_size"] for size in content["lengths"][0]["asked"]] == [1, 40]
    assert len(tracing.requests) == 1  # the second command reuses it


def test_several_gpus_and_numbers_of_ranks_are_a_table_with_sentences_on_the_least_that_fits(
    program: Program, tracing: FakeTracing
) -> None:
    tracing.held_gib = 20
    memory = ("--memory", "16GiB,80GiB,H100", "--nproc_per_node", "1,2")
    ended = program(*FULL, *memory, "--seq-len", "1024,65536", *CUDA)
    assert ended.status == 0
    (header, *rows), *_ = tables(ended.out)
    assert header == ["GPU", "ranks", "1024 tokens per row", "65536 tokens per row", "host memory"]
    assert [row[:2] for row in rows] == [[name, ranks] for name in ("16GiB", "80GiB", "H100") for ranks in "12"]
    assert [row[3] for row in rows] == ["none"] * 6
    assert [row[2] == "none" for row in rows] == [True, True, False, False, False, False]
    largest = json.loads(program(*FULL, "--memory", "80GiB", "--seq-len", "1024", "--json", *CUDA).out)["lengths"][0]
    assert rows[2][2] == f"{largest['largest_batch_size']} ({largest['used']['batch_size']})"
    assert "\nRows of 1024 tokens need at least 1 rank of 80GiB, or 1 rank of H100.\n" in ended.out
    assert "\nRows of 65536 tokens do not fit on any of these.\n" in ended.out
    assert [row[4] for row in rows] == ["1.4 GiB", "2.8 GiB"] * 3
    assert "\nHost memory: a machine's peak, with all ranks on it.\n" in ended.out
    added = [
        re.fullmatch(r"Beside tensors, a process has on (.*?) [0-9.]+ .iB to .*", line)
        for line in ended.out.splitlines()
    ]
    assert [found[1] for found in added if found] == [
        "1 rank of 16GiB, 1 rank of 80GiB",  # of which only the size is known
        "2 ranks of 16GiB, 2 ranks of 80GiB",  # with more for NCCL
        "1 rank of H100",
        "2 ranks of H100",
    ]
    assert [request["world_size"] for request in tracing.requests] == [1, 2]  # once for all GPUs
    asked = tables(program(*FULL, *memory, "--seq-len", "1024", "--batch-size", "1,99", *CUDA).out)[0]
    assert [row[2] for row in asked[1:]] == ["1 does not fit, 99 does not fit"] * 2 + ["1 fits, 99 does not fit"] * 4
    content = json.loads(program(*FULL, *memory, "--json", *CUDA).out)
    assert [(one["memory"], one["world_size"]) for one in content] == [
        (name, ranks) for name in ("16GiB", "80GiB", "H100") for ranks in (1, 2)
    ]


@pytest.mark.parametrize(
    ("asked", "batch_size"), [([], 3), (["--batch-size", "5"], 5), (["use_maximum_batch_size=True"], 16)]
)
def test_what_if_compares_changes_at_the_requested_or_the_used_batch_of_the_longest_rows(
    asked: list[str], batch_size: int, program: Program, tracing: FakeTracing
) -> None:
    arguments = (*FULL, "--memory", "80GiB", "--seq-len", "2048,1024", "--what-if", *CUDA, "batch_size=3", *asked)
    ended = program(*arguments)
    assert f"\nWith a batch of {batch_size} rows of 2048 tokens, in GiB:\n" in ended.out
    assert {"LoRA", "as it is", "2 ranks"} <= {row[0] for row in tables(ended.out)[-1]}
    content = json.loads(program(*arguments, "--json").out)
    assert content["what_if"][0]["change"] == "as it is"
    assert content["what_if"][0]["length"]["asked"][0]["batch_size"] == batch_size


STEP_OPTIONS = (*FULL, "--memory", "80GiB", "--seq-len", "1024,2048,512", *CUDA)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "batch_size"), [([], 4), (["--batch-size", "7"], 7), (["--batch-size", "3,7"], 4)])
def test_a_plot_is_of_the_longest_rows_and_the_requested_or_the_planned_batch(
    asked: list[str], batch_size: int, program: Program, tracing: FakeTracing, tmp_path: Path
) -> None:
    picture = tmp_path / "new" / "step.svg"
    options = ("--plot", str(picture), "adaptive.growth_limit=none", "gradient_accumulation_steps=1")
    ended = program(*STEP_OPTIONS, *asked, *options, *(["--json"] if asked else []))
    assert (ended.status, ended.err) == (0, "")
    assert asked or ended.out.endswith(f"\n\nPlot of the step written to {picture}.\n")
    assert tracing.only["config"]["gradient_accumulation_steps"] == 2  # nothing is traced for the plot alone
    assert f"A batch of {batch_size} rows of 2,048 tokens" in picture.read_text()
    assert [path.name for path in picture.parent.iterdir()] == ["step.svg"]


def test_a_plot_without_matplotlib_is_refused_before_tracing(
    program: Program, tracing: FakeTracing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    ended = program(*STEP_OPTIONS, "--plot", str(tmp_path / "step.svg"))
    assert ended.status == 1
    assert '`pip install "torchtune-adaptive[plot]"`' in ended.err
    assert tracing.requests == []


def test_a_table_says_that_parameters_are_on_the_host(program: Program, tracing: FakeTracing) -> None:
    tracing.host = HostFigures(offloaded_weights=200 * GIB, offloaded=700 * GIB)
    said = "Parameters, gradients and optimizer state are in host memory."
    table = program(*FULL, "--memory", "80GiB", "--nproc_per_node", "2,4", "--seq-len", "1024", *CUDA).out
    assert [row[3] for row in tables(table)[0]] == ["host memory", "1402.8 GiB", "2805.6 GiB"]
    assert f"a machine's peak, with all ranks on it. {said}\n" in table


def test_ranks_of_all_machines_are_planned_with_the_overrides_wherever_these_stand(
    program: Program, tracing: FakeTracing
) -> None:
    machines = ("--nproc_per_node", "4", "--nnodes", "2")
    ended = program("plan", CUDA[0], "--config", "tiny/full", CUDA[1], "--memory", "H100", *machines, "batch_size=7")
    assert tracing.only["world_size"] == 8
    assert tracing.only["config"]["batch_size"] == 7
    assert tracing.only["shows_progress"] is True
    again = program(*FULL, "--memory", "H100", *machines, *CUDA, "batch_size=7", "--json")
    content = json.loads(again.out)
    assert (ended.status, content["world_size"], content["host"]["ranks"]) == (0, 8, 4)
    assert len(tracing.requests) == 1  # of both


def test_memory_is_that_of_the_gpu_named_or_the_configs_limit(program: Program, tracing: FakeTracing) -> None:
    named = json.loads(program(*FULL, "--memory", "NVIDIA A100-SXM4-80GB", *CUDA, "--json").out)
    of_config = json.loads(program(*FULL, "adaptive.memory_limit=3GiB", "--json").out)
    assert [named["memory_bytes"], of_config["memory_bytes"]] == [memory_of("A100 80GB"), None]
    assert of_config["usable_bytes"] == round(0.95 * 3 * GIB)  # on a CPU nothing is outside of the allocator


def test_nccl_counts_where_the_recipe_that_runs_has_a_process_group(program: Program, tracing: FakeTracing) -> None:
    card, command = Card.named("H100"), [*FULL, "--memory", "H100", *CUDA, "--json"]
    for overrides, expected in (([], card.overhead(1, has_group=False)), (["ac_mode=selective"], card.overhead(1))):
        overhead = json.loads(program(*command, *overrides).out)["overhead"]
        assert overhead["least_outside_bytes"] == expected.least_outside_bytes


@pytest.mark.parametrize(
    ("overrides", "seq_lens"),
    [
        (["adaptive.seq_len=300"], [300]),
        ([], [256]),  # the tokenizer's max_seq_len
        (["~tokenizer.max_seq_len"], [512]),  # the model's, which is shorter than what is usual
        (["tokenizer.max_seq_len=null", "model.max_seq_len=4096"], [2048, 4096]),
        (["tokenizer.max_seq_len=null", "~model.max_seq_len"], [2048, 4096, 8192]),
    ],
)
def test_without_seq_len_lengths_are_those_of_the_config_else_the_usual_ones(
    overrides: Sequence[str], seq_lens: list[int], program: Program, tracing: FakeTracing
) -> None:
    program(*FULL, "--memory", "H100", *CUDA, *overrides)
    assert tracing.only["seq_lens"] == seq_lens


def test_where_nothing_fits_ways_to_fit_follow(program: Program, tracing: FakeTracing) -> None:
    ended = program(*FULL, "--memory", "10GiB", "--seq-len", "8192,16384", *CUDA)
    assert ended.status == 0
    assert ended.out.splitlines()[2] == "Nearest way: rows of 2048 tokens: at most 1 row of 2048 tokens."
    plan, _, after = ended.out.partition("\nChanges that need less memory:\n")
    assert len(tables(plan)[0]) == 3
    changes = [line.removeprefix("- ").partition(": ")[0] for line in after.splitlines()]
    assert changes == ["enable_activation_checkpointing=True", "LoRA and checkpointing", "rows of 2048 tokens"]
    assert after.splitlines()[-1] == "- rows of 2048 tokens: at most 1 row of 2048 tokens"
    first, *others = tracing.requests
    assert first["seq_lens"] == [8192, 16384]
    assert {tuple(request["seq_lens"]) for request in others} == {
        (16384,),
        (4096,),
        (2048,),
    }  # rows of 8192 tokens are known
    content = json.loads(program(*FULL, "--memory", "10GiB", "--seq-len", "16384", *CUDA, "--json").out)
    assert [one["change"].partition(": ")[0] for one in content["ways_to_fit"]] == changes


@pytest.mark.parametrize(
    ("options", "launcher", "recipe", "overrides"),
    [
        (["use_maximum_batch_size=True"], "", "single_device", " use_maximum_batch_size=True"),
        (["adaptive.seq_len=128"], "", "single_device", " adaptive.seq_len=128"),  # of trial steps, not of the data
        (
            ["--nnodes", "2", "--nproc_per_node", "4", "--seq-len", "128"],
            " --nnodes 2 --nproc_per_node 4",
            "distributed",
            " tokenizer.max_seq_len=128",
        ),
        (["batch_size=999"], "", "single_device", " batch_size=999 use_maximum_batch_size=True"),  # it does not fit
        (
            ["batch_size=999", "adaptive.max_tokens_per_micro_batch=99999999"],
            "",
            "single_device",
            " batch_size=999 adaptive.max_tokens_per_micro_batch=99999999 adaptive.max_tokens_per_micro_batch=auto",
        ),
        (["ac_mode=selective"], " --nproc_per_node 1", "distributed", " ac_mode=selective"),  # that for one ignores it
    ],
)
def test_a_plan_ends_with_the_command_that_runs_it(
    options: list[str], launcher: str, recipe: str, overrides: str, program: Program, tracing: FakeTracing
) -> None:
    last = program(*FULL, "--memory", "80GiB", *CUDA, *options).out.splitlines()[-1]
    run = f"  tune run{launcher} adaptive_full_finetune_{recipe} --config tiny/full"
    assert last == f"{run} {' '.join(CUDA)}{overrides}"


# ---- plans of Hugging Face models

HF = ("plan", "--hf", "some/model", "--memory", "80GiB")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "--memory", "H100"], "A plan needs either `--config` or `--hf`."),
        ([*HF, "--config", "tiny/full"], "A plan takes either `--config` or `--hf`, not both."),
        ([*HF, "--config=tiny/full"], "A plan takes either `--config` or `--hf`, not both."),
        ([*HF[:3]], "`--memory` is missing: a GPU's name or a size, as in H100 or 80GiB."),
        ([*HF, "--seq-len", "8,16"], "`--seq-len` must be an integer, but is '8,16' instead."),
        ([*HF, "--trainer", "adam"], "`--trainer` must be one of sft, dpo, transformers, but is 'adam' instead."),
        ([*HF, "bf16"], "Keys of a run are given as key=value, not as 'bf16'."),
        (
            [*HF, "--trainer", "transformers", "per_device_train_batch_size=0"],
            "`per_device_train_batch_size` must be at least 1, but is 0 instead.",
        ),
    ],
)
def test_bad_values_of_a_plan_of_a_hugging_face_model_are_refused(
    arguments: list[str], sentence: str, program: Program
) -> None:
    program.refuses(*arguments, sentence=sentence)


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}


@pytest.mark.slow
def test_a_hugging_face_model_is_planned_from_its_config(program: Program, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "args.json").write_text(json.dumps({"per_device_train_batch_size": 8, "bf16": True}))
    arguments = ("plan", "--hf", str(tmp_path), "--memory", "24GiB", "--seq-len", "64", "--trainer", "transformers")
    ended = program(*arguments, "--training-args", str(tmp_path / "args.json"))
    first, *_ = ended.out.splitlines()
    assert (ended.status, first) == (0, f"{tmp_path}, samples of 64 tokens: 0.10 M parameters in 1 layer")
    assert "\nAssumed: Trainer of transformers " in ended.out
    assert [row[0] for row in tables(ended.out)[1][1:]] == ["8"]


@pytest.mark.slow
def test_ways_to_fit_are_planned_for_a_hugging_face_model(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "_MOST_RANKS", 2)  # each number of ranks is traced, which takes a second
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    ended = program(
        *("plan", "--hf", str(tmp_path), "--memory", "600MiB", "--seq-len", "8192"),
        *("--trainer", "transformers", "bf16=True"),
    )
    changes = ended.out.partition("Changes that need less memory:\n")[2].splitlines()
    names = [change.removeprefix("- ").partition(":")[0] for change in changes]
    assert names[0] == "gradient_checkpointing=True"
    assert {"dtype=bfloat16", "fsdp=True on 2 ranks"} <= set(names)
    assert any(name.startswith("rows of ") for name in names)


# ---- what is refused

MEMORY = ("--memory", "80GiB")
REFUSED: dict[str, tuple[list[str], str]] = {
    "unknown GPU": (["--memory", "H1000"], "but is 'H1000' instead; did you mean `H100 80GB`"),
    "missing memory": (["~adaptive.memory_limit"], "`--memory` is missing"),
    "memory_limit refers to nothing": (["adaptive.memory_limit=${nosuchkey}"], "nosuchkey"),
    "several plans": (["--memory", "80GiB,H100", "--what-if"], "`--what-if` needs one GPU and one number of ranks."),
    "several batches": (
        [*MEMORY, "--what-if", "--batch-size", "1,2"],
        "`--what-if` needs one `--batch-size`, not 1,2.",
    ),
    "no ranks": ([*MEMORY, "--nproc_per_node", "0"], "`--nproc_per_node` must be at least 1, but is 0 instead."),
    "one of two lengths": ([*MEMORY, "--seq-len", "4096,-1"], "`--seq-len` must be at least 1, but is -1 instead."),
    "empty batch": ([*MEMORY, "--batch-size", "1,,2"], "`--batch-size` must be an integer, but is '' instead."),
    "model's length": (
        [*MEMORY, "~tokenizer.max_seq_len", "model.max_seq_len=-5"],
        "`model.max_seq_len` must be at least 1, but is -5 instead.",
    ),
    "misspelt key": ([*MEMORY, "adaptive.margn=0.1"], "did you mean `adaptive.margin`?"),
    "clipping over meshes": (
        [*MEMORY, "--nproc_per_node", "2", "tensor_parallel_dim=2", "clip_grad_norm=1.0"],
        "`tensor_parallel_dim: 2` cannot be combined with `clip_grad_norm: 1.0`",
    ),
    "a plot of another ending": (
        [*MEMORY, "--plot", "step.png"],
        "`--plot` must be a file that ends in .svg, but is 'step.png' instead.",
    ),
    "a plot below a file": (
        [*MEMORY, "--plot", f"{__file__}/new/step.svg"],
        f"`--plot` cannot be written: file '{__file__}/new/step.svg': Not a directory.",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_bad_value_is_refused_in_one_sentence_before_anything_is_traced(
    case: str, program: Program, tracing: FakeTracing
) -> None:
    arguments, sentence = REFUSED[case]
    program.refuses(*FULL, *arguments, sentence=sentence)
    assert tracing.requests == []


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("mistral/7B_full_ppo_low_memory", "`loss`"),
        ("llama2/7B_full_early_exit", "`--config`"),  # torchtune left it out
    ],
)
def test_a_config_of_another_recipe_is_refused(name: str, word: str, program: Program, tracing: FakeTracing) -> None:
    program.refuses("plan", "--config", name, *MEMORY, sentence=word)
    assert tracing.requests == []

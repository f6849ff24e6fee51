"""Each bad input is refused by all ranks with one sentence that quotes it, before any training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torchtune.models.llama2 import llama2

from tests.support.ranks import run_on_ranks
from tests.support.recipe_runs import SHALLOW, adaptive_recipe, set_up, shallow_assets, tiny_config
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import named_by_path
from torchtune_adaptive.tiny import MODEL_GEOMETRY

SEARCH = "use_maximum_batch_size=True"
GROW = "batch_increase_function="
PARALLEL = ["optimizer.fused=False", "clip_grad_norm=null"]
PARALLEL += [f"tensor_parallel_plan._component_={__name__}.plan_of_another_model"]
# What a config's keys and values alone say is checked in `tests/test_settings.py` and `tests/stock/test_checks.py`.
# What one part refuses alone is in the tests of that part.
CASES: dict[str, tuple[list[str], str]] = {
    "limit above the device": (
        [SEARCH, "adaptive.memory_limit=900TiB"],
        "`adaptive.memory_limit` must be at most what the device",
    ),
    "CPU search without limit": (
        [SEARCH, "adaptive.memory_limit=null"],
        "A search on the CPU needs `adaptive.memory_limit`",
    ),
    "function that raises": (
        [GROW + "tests.support.growth_functions.raises_late"],
        "ZeroDivisionError: division by zero.",
    ),
    "data below one row a micro-step": (
        [SEARCH, "gradient_accumulation_steps=64", "dataset.split=train[:100]"],
        "`dataset` has 100 samples, too few for one optimizer step (1 row * 64 micro-steps * 2 ranks = 128 samples",
    ),
    "samples of another method": (
        [
            "dataset._component_=torchtune.datasets.preference_dataset",
            "dataset.data_files=${tiny_dir}/preferences.json",
        ],
        "Samples of `dataset` need tokens, labels, but its first sample has chosen_input_ids, chosen_labels, ",
    ),
    "column that is not there": (
        ["dataset.column_map={input: nope, output: output}"],
        "`dataset` cannot load its first sample: KeyError: 'nope'.",
    ),
    "no checkpoint": (
        ["checkpointer.checkpoint_dir=/no/such"],
        "ValueError: /no/such is not a valid directory (",
    ),
    "tensor parallelism of another model": (
        [*PARALLEL, "tensor_parallel_dim=2"],
        "`tensor_parallel_plan` has 'layers.*.mlp.w9', which no module of the model matches.",
    ),
    "tensor parallelism over other ranks": (
        [*PARALLEL, "tensor_parallel_dim=3"],
        "world_size 2 must be divisible by tensor_parallel_dim 3",
    ),
    "nothing fits": ([SEARCH, "adaptive.memory_limit=9MiB"], "not even one row fits: its step ran out of memory at"),
}


def plan_of_another_model() -> dict[str, Any]:
    """A plan that a config can name, with a module that the model lacks."""
    from torch.distributed.tensor.parallel import ColwiseParallel
    from torchtune.models.llama3 import base_llama_tp_plan

    return base_llama_tp_plan() | {"layers.*.mlp.w9": ColwiseParallel()}


def _answers(rank: int, tiny_dir: Path, output_dir: Path) -> dict[str, str]:
    """The refusal of each case on this rank; no set-up may succeed."""
    answers: dict[str, str] = {}
    for name, (overrides, _) in CASES.items():
        cfg: Any = tiny_config("full", tiny_dir, output_dir, **SHALLOW)
        cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist(overrides))
        try:
            with named_by_path():
                set_up(adaptive_recipe("full"), cfg)
        except InputError as error:
            answers[name] = str(error)
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


@pytest.mark.slow
def test_a_teacher_of_another_vocabulary_is_refused_before_the_search(tiny_dir: Path, tmp_path: Path) -> None:
    geometry: dict[str, Any] = MODEL_GEOMETRY | {"vocab_size": 2112, "num_layers": 1}
    (weights := tmp_path / "weights").mkdir()
    torch.save(llama2(**geometry).state_dict(), weights / "teacher.pt")
    teacher = {f"teacher_model__{name}": value for name, value in geometry.items()}
    teacher |= {"teacher_checkpointer__checkpoint_dir": str(weights), "adaptive__memory_limit": "96MiB"}
    cfg = tiny_config(
        "lora_kd_single",
        shallow_assets(tiny_dir),
        tmp_path / "out",
        **SHALLOW,
        **teacher,
        use_maximum_batch_size=True,
    )
    with pytest.raises(InputError) as refused:
        set_up(adaptive_recipe("lora_kd_single"), cfg)
    assert str(refused.value) == "`teacher_model` needs the vocabulary of `model` (2048 tokens), but has 2112."

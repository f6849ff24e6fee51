"""A step of each method, planned with fake tensors, needs exactly the bytes that real steps are metered at."""

import functools
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.recipes.test_tensor_parallel import TWO
from tests.support.ranks import run_alone, run_on_ranks
from tests.support.recipe_runs import (
    SHALLOW,
    adaptive_recipe,
    loop_of,
    set_up,
    shallow_assets,
    tiny_config,
    without_saving,
)
from torchtune_adaptive.engine.search.probe import Prober
from torchtune_adaptive.engine.search.strategies import Probe
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.replay import exact
from torchtune_adaptive.plan.trace.config_steps import steps_of, trace_config
from torchtune_adaptive.plan.trace.fake_recipe import FakeRecipe
from torchtune_adaptive.plan.trace.step_events import StepEvents, TracedStep
from torchtune_adaptive.training.sizes import probe_batch

SEQ_LEN = 40
SIZES = (1, 5)
PHASES = ["forward", "loss", "backward", "clip", "optimizer"]
ONE_DEVICE = ["lora_kd_single"]
# These are planned like those above, except for some parts. On one rank nothing is sharded, as on one device.
OTHERS = ["full", "lora", "full_dpo", "lora_dpo", "lora_kd", "full_qat", "lora_qat"]
TP = " with tensor parallelism"
OTHERS_ON_ONE_DEVICE = ["full_single", "lora_single", "lora_dpo_single"]
GROUPS = ([f"full{TP}"], ONE_DEVICE, OTHERS, OTHERS_ON_ONE_DEVICE)
RARE = [(f"full{TP}", 4), *((kind, 2) for kind in OTHERS)] + [(kind, 1) for kind in OTHERS + OTHERS_ON_ONE_DEVICE]
CASES: list[Any] = [(f"full{TP}", 2)] + [(kind, 1) for kind in ONE_DEVICE]
CASES += [pytest.param(*case, marks=pytest.mark.exhaustive) for case in RARE]
DEEP = {
    "model__num_layers": 10,
    "model__embed_dim": 32,
    "model__intermediate_dim": 64,
    "gradient_accumulation_steps": 1,
}


def _config(kind: str, tiny_dir: Path, **overrides: Any) -> DictConfig:
    common = SHALLOW | {
        "gradient_accumulation_steps": 2,
        "enable_activation_checkpointing": kind in ("full_dpo", "lora_kd"),
        "custom_sharded_layers": ["tok_embeddings", "output"],
        "adaptive": {"oom_recovery": False},
        "clip_grad_norm": 1.0,
    }
    if kind.endswith(TP):
        kind, common = kind.removesuffix(TP), common | TWO
    return tiny_config(kind, tiny_dir, tiny_dir.with_name("planned"), **common | overrides)


def probes_of(recipe: Any, row: Any) -> list[Probe]:
    """Real steps of the recipe with ``SIZES`` times ``row``, metered exactly. A collective."""
    loop = loop_of(recipe)
    meter = loop.meter_for_probes()
    prober = Prober(loop, lambda rows: probe_batch(row, rows, micro_steps=2), meter=meter, forecasts=False)
    with meter.exactly(), loop.restored() as restore_optimizers:
        prober.warm_up(2, after_failure=restore_optimizers)
        for size in SIZES:
            prober.fits(size)
    return prober.probes


def _probes(kind: str, tiny_dir: Path) -> list[Probe]:
    recipe: Any = set_up(without_saving(adaptive_recipe(kind.removesuffix(TP))), _config(kind, tiny_dir))
    return probes_of(recipe, recipe.row_format().stretched(recipe.trainer.loader.dataset[0], SEQ_LEN))


def _probes_of_all(_: int, kinds: list[str], tiny_dir: Path) -> dict[str, list[Probe]]:
    return {kind: _probes(kind, tiny_dir) for kind in kinds}


def _plans_of_all(kinds: list[str], ranks: int, tiny_dir: Path) -> dict[str, TracedStep]:
    return {kind: trace_config(_config(kind, tiny_dir), world_size=ranks, seq_lens=[SEQ_LEN]) for kind in kinds}


def _group_of(kind: str) -> int:
    """The index of the group of kinds that share processes with ``kind``."""
    return next(place for place, kinds in enumerate(GROUPS) if kind in kinds)


@pytest.fixture(scope="module")
def metered(tiny_dir: Path) -> Any:
    """A function from kind and number of ranks to the probes of rank 0."""
    directory = shallow_assets(tiny_dir)

    @functools.cache
    def probes(group: int, ranks: int) -> dict[str, list[Probe]]:
        kinds = GROUPS[group]
        if kinds[0].endswith("_single"):
            return run_alone(_probes_of_all, 0, kinds, directory)
        return run_on_ranks(_probes_of_all, ranks, kinds, directory)[0]

    return lambda kind, ranks: probes(_group_of(kind), ranks)[kind]


@pytest.fixture(scope="module")
def planned(tiny_dir: Path) -> Any:
    """A function from kind and number of ranks to the plan."""

    @functools.cache
    def plans(group: int, ranks: int) -> dict[str, TracedStep]:
        return run_alone(_plans_of_all, GROUPS[group], ranks, tiny_dir)

    return lambda kind, ranks: plans(_group_of(kind), ranks)[kind]


@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_every_phase_of_a_step_needs_what_was_planned_to_the_byte(
    kind: str, ranks: int, metered: Any, planned: Any
) -> None:
    step: StepEvents = planned(kind, ranks).lengths[0]
    # One rank is planned as one device, where the stock teacher requires gradients, so its projections hold more.
    excepted = {"forward"} if (kind, ranks) == ("lora_kd", 1) else set()
    assert [probe.batch_size for probe in metered(kind, ranks)] == list(SIZES)
    for probe in metered(kind, ranks):
        memory = exact(step.at(probe.batch_size))
        phases = memory.phases
        assert list(phases) == PHASES
        assert all(phases[phase] == probe.phase_peak_bytes[phase] for phase in set(PHASES) - excepted)
        assert all(phases[phase] >= probe.phase_peak_bytes[phase] for phase in excepted)
        assert memory.allocated_bytes == probe.peak_bytes


@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_a_reference_and_a_teacher_are_counted_as_frozen_models_and_a_row_of_dpo_as_two(
    kind: str, ranks: int, planned: Any
) -> None:
    step: TracedStep = planned(kind, ranks)
    assert step.sequences == (2 if "dpo" in kind else 1)
    frozen, trained = step.num_frozen_parameters, step.num_parameters - step.num_frozen_parameters
    kinds = [exact(step.lengths[0].at(2)).kinds(phase) for phase in PHASES]
    if kind == "full_dpo":
        assert frozen == trained
        assert all(one["frozen models"] == one["parameters"] for one in kinds)
    elif kind.startswith("lora_kd"):  # the teacher has more layers
        assert frozen > trained
        assert all(one["frozen models"] > one["parameters"] for one in kinds)
    else:
        assert frozen == 0
        assert not any("frozen models" in one for one in kinds)


# ---- many layers

DEEPER = ("full_dpo", "full_qat")


def deep_plan(cfg: DictConfig) -> tuple[tuple[int, ...], list[Any]]:
    """Which layers are traced; events and figures of the whole model from these layers, and from all."""
    with steps_of(cfg, world_size=2) as steps:
        layers = steps.layers_to_trace(SEQ_LEN)
        of_recipes = FakeRecipe.figures, FakeRecipe.host_figures
        found = [
            (steps.lengths([SEQ_LEN], one)[0].at(7), *(steps.grown(one, figures_of) for figures_of in of_recipes))
            for one in (layers, (steps.num_layers,))
        ]
    return layers, found


def _deep_plans(tiny_dir: Path) -> dict[str, Any]:
    return {kind: deep_plan(_config(kind, tiny_dir, **DEEP)) for kind in (*DEEPER, "lora_kd")}


@pytest.fixture(scope="module")
def deep_plans(tiny_dir: Path) -> dict[str, Any]:
    return run_alone(_deep_plans, tiny_dir)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", DEEPER)
def test_many_layers_are_planned_from_few(kind: str, deep_plans: Any) -> None:
    layers, (from_few, whole) = deep_plans[kind]
    assert layers == (4, 6)
    assert from_few == whole


@pytest.mark.exhaustive
def test_models_of_different_depths_are_traced_whole(deep_plans: Any) -> None:
    layers, _ = deep_plans["lora_kd"]
    assert layers == (10,)


# ---- what is refused

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "The recipe cannot be set up: AssertionError: Number of output chunks": (
        "lora_kd",
        {"kd_loss__num_output_chunks": 3},
    ),
    "`teacher_model` must be a TransformerDecoder": (
        "lora_kd",
        {"teacher_model": {"_component_": "tests.support.fake_models.of_images"}},
    ),
    "Rows have 40 tokens, but the model takes at most 32.": (
        "lora_kd",
        {"teacher_model__max_seq_len": 32},
    ),
    "`optimizer_in_bwd` must be False": ("full_dpo", {"optimizer_in_bwd": True}),
}


def _refusals(tiny_dir: Path) -> list[str]:
    said = []
    for kind, overrides in REFUSED.values():
        try:
            trace_config(_config(kind, tiny_dir, **overrides), world_size=1, seq_lens=[SEQ_LEN])
        except InputError as error:
            said.append(str(error))
    return said


def test_a_config_that_cannot_be_planned_is_refused_with_the_reason(tiny_dir: Path) -> None:
    said = run_alone(_refusals, tiny_dir)
    assert len(said) == len(REFUSED)
    assert all(one.startswith(sentence) for one, sentence in zip(said, REFUSED, strict=True)), said

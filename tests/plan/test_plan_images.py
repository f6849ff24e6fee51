"""A step with images, planned with fake tensors, needs exactly the bytes that real steps are metered at."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch.utils._pytree import tree_leaves

from tests.plan.test_plan_methods import SEQ_LEN, SIZES, deep_plan, probes_of
from tests.support import images
from tests.support.ranks import run_alone, run_on_ranks
from tests.support.recipe_runs import adaptive_recipe, set_up, tiny_config, without_saving
from torchtune_adaptive.engine.search.strategies import Probe
from torchtune_adaptive.plan.replay import exact
from torchtune_adaptive.plan.trace.config_steps import trace_config
from torchtune_adaptive.plan.trace.step_events import TracedStep

IMAGES = 2
RARE = [("full", 2), ("full_single", 1), ("lora", 2)]
CASES = [
    ("lora_single", 1),
    *(pytest.param(kind, ranks, marks=pytest.mark.exhaustive) for kind, ranks in RARE),
]


def _config(kind: str, places: tuple[Path, Path], **overrides: Any) -> DictConfig:
    tiny_dir, assets = places
    common: dict[str, Any] = {"gradient_accumulation_steps": 2}
    common |= {
        "adaptive": {"oom_recovery": False, "max_images": IMAGES},
        "enable_activation_checkpointing": "lora" in kind,
    }
    return tiny_config(
        kind, tiny_dir, tiny_dir.with_name("planned"), **images.config_of(kind, assets) | common | overrides
    )


def _probes(_: int, kind: str, places: tuple[Path, Path]) -> tuple[list[Probe], int]:
    """The probes of the recipe, and the bytes of their row. A collective."""
    recipe: Any = set_up(without_saving(adaptive_recipe(kind)), _config(kind, places))
    row = recipe.row_format().worst_case(
        recipe.trainer.loader.dataset, seq_len=SEQ_LEN, tokenizer_max_seq_len=None, consensus=recipe._consensus
    )
    storages = {one.untyped_storage() for one in tree_leaves(row) if isinstance(one, torch.Tensor)}
    return probes_of(recipe, row), sum(storage.nbytes() for storage in storages)


def _plan(kind: str, ranks: int, places: tuple[Path, Path]) -> TracedStep:
    return trace_config(_config(kind, places), world_size=ranks, seq_lens=[SEQ_LEN])


@pytest.fixture(scope="module")
def places(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_dir, images.make_assets(tmp_path_factory.mktemp("images") / "assets")


@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_every_phase_needs_what_was_planned_to_the_byte(kind: str, ranks: int, places: tuple[Path, Path]) -> None:
    """On a CPU the row of a probe is in the metered memory too, from which its batches are made."""
    step = run_alone(_plan, kind, ranks, places)
    assert (step.images, step.tiles) == (IMAGES, images.MAX_TILES)
    real = run_alone(_probes, 0, kind, places) if ranks == 1 else run_on_ranks(_probes, ranks, kind, places)[0]
    probes, row_bytes = real
    assert [probe.batch_size for probe in probes] == list(SIZES)
    for probe in probes:
        memory = exact(step.lengths[0].at(probe.batch_size))
        assert {phase: peak + row_bytes for phase, peak in memory.phases.items()} == probe.phase_peak_bytes
        assert memory.allocated_bytes + row_bytes == probe.peak_bytes


@pytest.mark.exhaustive
def test_many_layers_of_text_are_planned_from_few(places: tuple[Path, Path]) -> None:
    cfg = _config("lora", places, model__num_layers=12, gradient_accumulation_steps=1)
    layers, (from_few, whole) = run_alone(deep_plan, cfg)
    assert layers == (6, 8)  # every second one is fused with the images
    assert from_few == whole

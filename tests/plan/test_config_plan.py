"""A plan of a config: which batch a run with its settings uses, and what is traced for it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig

from tests.support.plans import GIB, Asked, cfg_of, gives, planned, rows_of, step_of
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.config_plan import ConfigLaunch
from torchtune_adaptive.plan.gpu import Card

# Rows of 512 tokens; 10 of them fit.
STEP = step_of(rows_of(512, held_bytes=100, bytes_per_row=10))
EIGHT_GIB = Card(name="8GiB", memory_bytes=8 * GIB)


def launch(cfg: DictConfig, *, world_size: int = 1, seq_lens: tuple[int, ...] = (512,)) -> ConfigLaunch:
    return ConfigLaunch(title="any", cfg=cfg, card=EIGHT_GIB, world_size=world_size, seq_lens=seq_lens)


# ---- the batch that a run uses

SEARCHES: dict[str, Any] = {"use_maximum_batch_size": True}


@pytest.mark.parametrize(
    ("settings", "rows", "samples"),
    [
        # Without a search it is the config's, whether it fits or not.
        ({"batch_size": 64}, 64, 64 * 8),
        ({"batch_size": 2, "gradient_accumulation_steps": 4}, 2, 2 * 4 * 8),
        ({"batch_size": 2, "global_batch_size": 200}, 2, 200),
        ({"batch_size": 64, "global_batch_size": 200}, 25, 200),
        # A search finds it.
        (SEARCHES | {"batch_size": 2}, 8, 8 * 8),
        (SEARCHES | {"max_batch_size": 7, "power_of_two": False}, 7, 7 * 8),
        (SEARCHES | {"global_batch_size": 8}, 1, 8),
        (SEARCHES | {"global_batch_size": 20}, 3, 20),  # the whole share fits at once
        (SEARCHES | {"global_batch_size": 200}, 8, 200),
        # A growing batch starts at the config's, in several micro-batches if it does not fit.
        ({"batch_size": 3, "batch_increase_function": "tests.support.plans.grows_by_one"}, 3, 3 * 8),
        ({"batch_size": 64, "batch_increase_function": "tests.support.plans.grows_by_one"}, 8, 64 * 8),
        # A token budget cuts what a step has: rows of 512 tokens.
        ({"batch_size": 64, "max_tokens_per_micro_batch": 2048}, 4, 64 * 8),
        ({"batch_size": 2, "gradient_accumulation_steps": 3, "max_tokens_per_micro_batch": 8192}, 6, 2 * 3 * 8),
        ({"batch_size": 64, "max_tokens_per_micro_batch": 100}, 1, 64 * 8),
        ({"batch_size": 64, "max_tokens_per_micro_batch": "auto"}, 10, 64 * 8),
        ({"batch_size": 2, "global_batch_size": 200, "max_tokens_per_micro_batch": 2048}, 4, 200),
        (SEARCHES | {"max_tokens_per_micro_batch": 1024}, 2, 8 * 8),
    ],
    ids=str,
)
def test_the_batch_and_the_samples_of_a_run(settings: dict[str, Any], rows: int, samples: int) -> None:
    cfg = cfg_of(**{"use_maximum_batch_size": False, "device": "cpu", "margin": 0} | settings)
    length = planned(cfg, STEP, memory_bytes=200, world_size=8).lengths[0]
    assert (length.largest_batch_size, length.used.batch_size) == (10, rows)
    assert length.tokens_per_step == samples * 512


@given(st.integers(1, 300), st.booleans(), st.none() | st.integers(1, 300))
def test_a_search_uses_no_more_than_fits_or_is_allowed(fitting: int, power_of_two: bool, bound: int | None) -> None:
    step = step_of(rows_of(512, held_bytes=100, bytes_per_row=10))
    cfg = cfg_of(device="cpu", margin=0, power_of_two=power_of_two, max_batch_size=bound)
    used = planned(cfg, step, memory_bytes=100 + 10 * fitting).lengths[0].used.batch_size
    most = min(fitting, bound or fitting)
    assert used in {2**exponent for exponent in range(20)} if power_of_two else used == most
    assert used <= most < 2 * used


def test_a_batch_that_does_not_fit_has_figures_too() -> None:
    used = planned(cfg_of(device="cpu", margin=0), STEP, memory_bytes=50).lengths[0].used
    assert (used.batch_size, used.fits, used.allocated_bytes) == (1, "does not fit", 110)


def test_a_config_without_a_batch_size_is_refused_unless_it_searches() -> None:
    tracer = gives(STEP)
    with pytest.raises(InputError, match=r"^`batch_size` must be an integer, but is None instead\.$"):
        launch(cfg_of(use_maximum_batch_size=False)).plan(tracer)
    assert tracer.asked == []


# ---- what is traced


@pytest.mark.parametrize(
    ("changes", "micro_steps"),
    [
        ({"adaptive": {"global_batch_size": 8}}, 2),
        ({"adaptive": {"max_tokens_per_micro_batch": 64}}, 2),
        ({"adaptive": {"growth_limit": 16}}, 2),
        ({"batch_increase_function": {"_component_": "torchtune_adaptive.schedule.gradient_noise_scale"}}, 2),
        ({"gradient_accumulation_steps": 5}, 5),
        ({}, 1),
    ],
    ids=str,
)
def test_two_micro_steps_are_traced_where_training_may_take_any_number_or_measures_a_step(
    changes: dict[str, Any], micro_steps: int
) -> None:
    tracer = gives(STEP)
    cfg = DictConfig(cfg_of() | changes)
    before = cfg.copy()
    launch(cfg, world_size=8, seq_lens=(512, 1024)).plan(tracer)
    assert tracer.asked == [Asked(DictConfig(cfg | {"gradient_accumulation_steps": micro_steps}), 8, (512, 1024))]
    assert cfg == before


def test_fewer_samples_per_step_than_ranks_are_refused_before_anything_is_traced() -> None:
    tracer = gives(STEP)
    with pytest.raises(InputError, match=r"at least the number of ranks \(8\), but is 7 instead\.$"):
        launch(cfg_of(global_batch_size=7), world_size=8).plan(tracer)
    assert tracer.asked == []

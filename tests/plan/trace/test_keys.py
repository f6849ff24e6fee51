"""Every key that torchtune's recipes read is modelled, refused, or without effect for a reason."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.trace.keys import DECIDED, REFUSED, TRACED, WITHOUT_EFFECT, traced_content
from torchtune_adaptive.stock.checks import keys_read
from torchtune_adaptive.stock.installed import adaptive_name, recipe_files, stock_recipe_files


def _keys_of_planned_recipes() -> set[str]:
    files = stock_recipe_files()
    planned = [name for name in files if adaptive_name(name) in recipe_files() and "ppo" not in name]
    return {key for name in planned for key in keys_read(files[name][0])}


def test_every_key_that_a_planned_recipe_reads_is_in_exactly_one_table() -> None:
    tables = [TRACED, DECIDED, WITHOUT_EFFECT, REFUSED]
    listed = [key for table in tables for key in table]
    assert len(_keys_of_planned_recipes()) > 40
    assert sorted(_keys_of_planned_recipes() - set(listed)) == []
    assert sorted(set(listed) - _keys_of_planned_recipes()) == []
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"metric_logger": {"_component_": "mine.Logger"}, "seed": 7, "output_dir": "elsewhere"}, True),
        ({"batch_size": 4, "adaptive": {"margin": 0.5}, "my_own": 3}, True),
        ({"dataset": {"_component_": "mine.Dataset", "source": "x"}}, True),
        ({"dataset": {"_component_": "mine.Dataset", "packed": True}}, False),
        ({"dataset": [{"_component_": "mine.Dataset"}, {"_component_": "mine.Other", "packed": True}]}, False),
        ({"gradient_accumulation_steps": 2}, False),
        ({"compile": True}, False),
        ({"optimizer": {"_component_": "torch.optim.SGD"}}, False),
    ],
)
def test_a_step_depends_on_the_traced_keys_alone(changes: dict[str, Any], is_same: bool) -> None:
    plain = {"model": {"_component_": "torchtune.models.x"}, "batch_size": 2}
    cfg, changed = OmegaConf.create(plain), OmegaConf.create(plain | changes)
    assert (traced_content(cfg) == traced_content(changed)) == is_same


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"tensor_parallel_dim": 8, "compile": True},
            "`compile` cannot be planned with `tensor_parallel_dim: 8`.",
        ),
        (
            {"cudnn_deterministic_mode": "warn"},
            "`cudnn_deterministic_mode: warn` cannot be planned: its kernels take other memory.",
        ),
        ({"device": "foo"}, "`device` must be the CPU or CUDA, but is 'foo' instead."),
        ({"device": "xpu:0"}, "`device` must be the CPU or CUDA, but is 'xpu:0' instead."),
        (
            {"dataset": [{"packed": False}, {"packed": "yes"}]},
            "`dataset.packed` must be True or False, but is 'yes' instead.",
        ),
    ],
)
def test_values_with_which_a_step_would_be_planned_wrongly_are_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        traced_content(OmegaConf.create(values))
    assert str(caught.value) == sentence

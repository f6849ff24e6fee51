"""How the adapter uses a stock recipe's attributes where it makes its own decisions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.support.recipe_runs import adaptive_recipe
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import named_by_path
from torchtune_adaptive.stock import recipe
from torchtune_adaptive.stock.configs import load_config
from torchtune_adaptive.stock.recipe import AdaptiveRecipe


def stock(**attributes: Any) -> Any:
    """Attributes of a set-up stock recipe, with the adapter's defaults."""
    defaults = {name: value for name, value in vars(AdaptiveRecipe).items() if not callable(value)}
    return SimpleNamespace(**defaults | {"_device": torch.device("cuda")} | attributes)


PROFILED = {"profiler_wait_steps": 5, "profiler_warmup_steps": 3, "profiler_active_steps": 2}


@pytest.mark.parametrize(
    ("attributes", "steps"),
    [
        ({"profiler_profile_memory": True} | PROFILED, range(9, 12)),
        ({"profiler_profile_memory": False}, None),
        ({"profiler_profile_memory": True, "_device": torch.device("cpu")} | PROFILED, None),
        ({"_is_rank_zero": False}, None),
    ],
    ids=["the active ones and one more", "not asked for", "on a CPU", "not on other ranks"],
)
def test_memory_is_recorded_in_the_profilers_active_steps(attributes: dict[str, Any], steps: range | None) -> None:
    assert AdaptiveRecipe._memory_steps(stock(**attributes)) == steps


def test_a_value_that_a_component_does_not_take_is_refused_before_the_recipe_is_set_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipe, "check_config", lambda *_, **__: None)
    cfg = OmegaConf.create({"optimizer": {"_component_": "torch.optim.AdamW", "lr": "fast"}})
    with pytest.raises(InputError, match=r"^`optimizer\.lr` must be a number"):
        _Recipe(cfg)


@pytest.mark.parametrize("kind", ["full_single", "lora_kd"])
def test_a_loss_step_of_ones_own_is_refused_because_nothing_would_call_it(kind: str) -> None:
    recipe_class: Any = adaptive_recipe(kind)

    class Mine(recipe_class):
        def _loss_step(self, batch: Any) -> Any:
            return super()._loss_step(batch) * 2

    cfg = load_config("tiny/full")
    sentence = (
        r"^`_loss_step` of Mine would have no effect: the loss of a micro-batch is that of `objective\(\)`, which"
    )
    with pytest.raises(InputError, match=sentence), named_by_path():
        Mine(cfg=cfg)


class _Data:
    def __init__(self, **_: Any) -> None: ...

    def _setup_data(self, answer: Any) -> Any:
        return answer


class _Recipe(AdaptiveRecipe, _Data): ...


@pytest.mark.parametrize(
    "wrap", [lambda loader: loader, lambda loader: (None, loader)], ids=["a loader", "and sampler"]
)
def test_an_empty_data_set_is_refused_and_another_is_passed_on(wrap: Any) -> None:
    empty_recipe = _Recipe.__new__(_Recipe)
    full = wrap(SimpleNamespace(dataset=[1]))
    assert empty_recipe._setup_data(full) is full
    with pytest.raises(InputError, match=r"^`dataset` has no samples\.$"):
        empty_recipe._setup_data(wrap(SimpleNamespace(dataset=[])))

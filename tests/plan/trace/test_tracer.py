"""A config is traced in this process: its whole step takes the planned bytes, and nothing stays behind."""

import logging
import sys
import warnings
from typing import Any

import pytest
import torchtune.training._activation_offloading as torchtune_offloading
from omegaconf import DictConfig

from tests.plan.trace.test_loop import state_of_torch
from tests.support.ranks import run_alone
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.trace.config_steps import steps_of
from torchtune_adaptive.plan.trace.events import Events, extended
from torchtune_adaptive.plan.trace.tracer import Tracer
from torchtune_adaptive.stock.configs import load_config

SEQ_LEN = 64
SHALLOW = "model.num_layers=1"
FAULTY = "tests.support.fake_models"


def _full(*overrides: str) -> DictConfig:
    return load_config("tiny/full", [SHALLOW, *overrides])


def _events_of(*asked: tuple[DictConfig, int]) -> list[Events]:
    found = []
    for cfg, ranks in asked:
        with steps_of(cfg, world_size=ranks) as steps:
            found.append(steps.events(steps.num_layers, 2, SEQ_LEN))
    return found


def _planned_and_whole(cfg: DictConfig) -> tuple[Events | None, Events]:
    """The events of a batch of 5 rows that follow from those of 2 and 3, and those that are traced."""
    with steps_of(cfg, world_size=1) as steps:
        few, more, most = (steps.events(steps.num_layers, rows, SEQ_LEN) for rows in (2, 3, 5))
    return extended(few, more, 3), most


def test_a_whole_step_of_more_rows_takes_and_gives_back_what_was_planned() -> None:
    """Eager code is compared with metered steps in ``test_plan_methods.py``."""
    compiled = load_config("tiny/lora", [SHALLOW, "gradient_accumulation_steps=2", "compile=True"])
    planned, traced = run_alone(_planned_and_whole, compiled)
    assert planned == traced


def test_a_step_does_not_depend_on_those_traced_before_it_or_on_the_environment_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = load_config("tiny/lora", [SHALLOW, "compile=True", "model.lora_dropout=0.1", "device=cuda"])
    alone = run_alone(_events_of, (_full(), 2))
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "5"), ("MASTER_ADDR", "nowhere")):
        monkeypatch.setenv(name, value)
    before, between, after = run_alone(_events_of, (compiled, 1), (_full(), 2), (compiled, 1))
    assert [between] == alone
    assert after == before


@pytest.mark.slow
def test_progress_is_shown_on_standard_error_and_nothing_else_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    Tracer(shows_progress=True).step(_full(), world_size=1, seq_lens=[SEQ_LEN])
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.strip().startswith("tracing")
    assert printed.err.count("\n") == 1


def _state() -> list[Any]:
    """What tracing a config changes, in torchtune too."""
    recipe: Any = sys.modules["adaptive_full_finetune_distributed"].StockRecipe
    return [
        dict(vars(recipe._setup_model.__globals__["training"])),
        torchtune_offloading.OffloadActivations,
        logging.root.manager.disable,
        list(warnings.filters),
        sys.stdout,
        *state_of_torch(),
    ]


@pytest.mark.slow
def test_nothing_stays_behind() -> None:
    cfg = _full("device=cuda", "enable_activation_checkpointing=True", "enable_activation_offloading=True")
    _events_of((cfg, 1))  # imports
    before = _state()
    Tracer().step(cfg, world_size=2, seq_lens=[8])
    with pytest.raises(InputError):
        Tracer().step(_failing("FailsInItsStep"), world_size=2, seq_lens=[8])
    assert _state() == before


def _failing(optimizer: str) -> DictConfig:
    return _full("~optimizer.fused", f"optimizer._component_={FAULTY}.{optimizer}")


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        ("FailsInItsStep", "ZeroDivisionError: division by zero"),
        ("EndsInItsStep", "SystemExit: 0 (fake_models.py, line "),
    ],
)
def test_an_error_of_code_that_the_config_names_is_one_sentence_with_its_place(optimizer: str, reason: str) -> None:
    with pytest.raises(InputError) as failed:
        Tracer().step(_failing(optimizer), world_size=1, seq_lens=[SEQ_LEN])
    before, _, after = str(failed.value).partition(f" raised {reason}")
    assert before.startswith("A train step of the config cannot be traced: ")
    assert "fake_models.py:" in before
    assert after.endswith(".")


@pytest.mark.parametrize("place", ["model", "optimizer"])
def test_an_interrupt_ends_the_trace(place: str) -> None:
    """As Ctrl-C, in the set-up and in a step."""
    cfg = _failing("InterruptedInItsStep") if place == "optimizer" else _full(f"loss._component_={FAULTY}.interrupted")
    with pytest.raises(KeyboardInterrupt):
        Tracer().step(cfg, world_size=1, seq_lens=[SEQ_LEN])

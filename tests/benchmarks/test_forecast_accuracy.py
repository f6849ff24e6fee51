"""The memory of a step that is forecast from fake tensors equals that of real steps, to the byte."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.forecast_accuracy import (
    Case,
    config_of,
    forecast,
    step_probes,
    write_checkpoint,
)
from benchmarks.live import live_recipe, loop_of
from tests.support.ranks import run_on_ranks
from torchtune_adaptive.engine.search.strategies import Probe
from torchtune_adaptive.plan.replay import exact
from torchtune_adaptive.plan.trace.step_events import TracedStep

RANKS = 2
SIZES = (1, 5, 9)
PHASES = ["forward", "loss", "backward", "clip", "optimizer"]
CHUNKED = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss", "num_output_chunks": 3}
FULL: dict[str, Any] = {
    "model": {
        "_component_": "torchtune.models.llama2.llama2",
        "vocab_size": 2049,
        "num_layers": 10,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": 40,
        "intermediate_dim": 94,
        "max_seq_len": 64,
    },
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4, "fused": True},
    "loss": CHUNKED,
}
LORA: dict[str, Any] = {
    "model": {
        "_component_": "torchtune.models.qwen2.lora_qwen2",
        "vocab_size": 2048,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "embed_dim": 24,
        "intermediate_dim": 70,
        "max_seq_len": 64,
        "tie_word_embeddings": True,
        "lora_attn_modules": ["q_proj", "v_proj"],
        "apply_lora_to_mlp": True,
        "lora_rank": 5,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
    },
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 1e-4, "momentum": 0.9, "foreach": True},
    "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
    "dtype": "bf16",
    "gradient_accumulation_steps": 2,
    "enable_activation_checkpointing": True,
}
CASES = {  # a row of the first is so short that gradients, which gloo copies to reduce them, decide the peak
    "full": Case(number=0, kind="full", world_size=RANKS, seq_len=9, options=FULL, rows=5),
    "lora": Case(number=1, kind="lora", world_size=RANKS, seq_len=33, options=LORA, rows=5),
}


def _probe(rank: int, tiny_dir: Path, directory: Path) -> dict[str, list[Probe]]:
    """Real steps of every case."""
    recipes = {kind: live_recipe(config_of(case, tiny_dir, directory)) for kind, case in CASES.items()}
    return {kind: step_probes(one, loop_of(one), SIZES, limit_bytes=None) for kind, one in recipes.items()}


@pytest.fixture(scope="module")
def forecasts_and_steps(
    tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, TracedStep | str], list[dict[str, list[Probe]]]]:
    """By kind: the forecasts, and the real steps of each rank."""
    directory = tmp_path_factory.mktemp("forecast")
    configs = {kind: config_of(case, tiny_dir, directory) for kind, case in CASES.items()}
    forecasts = {kind: forecast(case, configs[kind]) for kind, case in CASES.items()}
    for cfg in configs.values():
        write_checkpoint(cfg)
    return forecasts, run_on_ranks(_probe, RANKS, tiny_dir, directory)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", CASES)
def test_every_phase_of_a_step_needs_what_was_forecast_to_the_byte(kind: str, forecasts_and_steps: Any) -> None:
    forecasts, (first, _) = forecasts_and_steps
    (step,) = forecasts[kind].lengths
    assert [probe.batch_size for probe in first[kind]] == list(SIZES)
    assert len({probe.peak_bytes for probe in first[kind]}) == len(SIZES)
    for probe in first[kind]:
        memory = exact(step.at(probe.batch_size))
        forecast_of_phases = memory.phases
        assert list(forecast_of_phases) == PHASES
        assert {phase: probe.phase_peak_bytes[phase] for phase in PHASES} == forecast_of_phases
        assert memory.allocated_bytes == probe.peak_bytes


@pytest.mark.exhaustive
def test_many_layers_are_forecast_from_few(forecasts_and_steps: Any) -> None:
    forecasts, _ = forecasts_and_steps
    assert max(forecasts["full"].traced_layers) < forecasts["full"].num_layers == FULL["model"]["num_layers"]


@pytest.mark.exhaustive
def test_no_rank_needs_more_than_the_first_one(forecasts_and_steps: Any) -> None:
    _, (first, second) = forecasts_and_steps
    for kind in CASES:
        assert all(theirs.peak_bytes <= ours.peak_bytes for ours, theirs in zip(first[kind], second[kind], strict=True))

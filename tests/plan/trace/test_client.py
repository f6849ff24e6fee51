"""A step traced with its modules takes the planned bytes, and each part of the model has its own bytes."""

import json
import sys
from collections import Counter
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.support.ranks import run_alone
from torchtune_adaptive.plan.trace import client
from torchtune_adaptive.plan.trace.events import BEFORE_STEP, Operation, StepEvents
from torchtune_adaptive.plan.trace.worker import _answer
from torchtune_adaptive.stock.configs import load_config

SEQ_LEN, BATCH_SIZE = 64, 5  # plans trace batches of 2 and 3, and predict the bytes of one of 5
CASES = {
    "full, 2 ranks": ("full", 2, ["model.num_layers=2", "enable_activation_checkpointing=True"]),
    "compiled lora": ("lora", 1, ["model.num_layers=2", "gradient_accumulation_steps=2", "compile=True"]),
}


def _cfg(name: str) -> DictConfig:
    kind, _, overrides = CASES[name]
    return load_config(f"tiny/{kind}", overrides)


def _planned_and_traced() -> dict[str, tuple[dict[str, float], StepEvents]]:
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_run_worker", lambda request, **_: json.loads(json.dumps(_answer(request, sys.stderr))))
        for name, (_, ranks, _) in CASES.items():
            tracer = client.Tracer()
            planned = tracer.step(_cfg(name), world_size=ranks, seq_lens=[SEQ_LEN]).peaks[0].phases(BATCH_SIZE)
            events = tracer.events(_cfg(name), world_size=ranks, batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
            found[name] = planned, events
    return found


@pytest.fixture(scope="module")
def planned_and_traced() -> dict[str, tuple[dict[str, float], StepEvents]]:
    return run_alone(_planned_and_traced)


@pytest.mark.parametrize("name", CASES)
def test_every_phase_takes_the_planned_bytes(name: str, planned_and_traced: Any) -> None:
    planned, events = planned_and_traced[name]
    peaks = dict.fromkeys((operation.phase for operation in events.operations), 0)
    for operation, live_bytes in zip(events.operations, events.total_bytes, strict=True):
        peaks[operation.phase] = max(live_bytes, peaks[operation.phase])
    assert peaks == planned
    assert events.peak_bytes == max(planned.values())


def _bytes(events: StepEvents, kind: str, *, before_step: bool) -> Counter[str]:
    """The bytes of ``kind`` by module."""
    found: Counter[str] = Counter()
    for one in events.allocations:
        if one.kind == kind and (one.made == BEFORE_STEP) == before_step:
            found[one.module] += one.num_bytes
    return found


def test_parameters_and_optimizer_state_belong_to_their_module(planned_and_traced: Any) -> None:
    _, events = planned_and_traced["full, 2 ranks"]
    w1_bytes = 4 * 384 * 128 // 2
    held, state = (_bytes(events, kind, before_step=True) for kind in ("parameters", "optimizer state"))
    for layer in ("layers.0", "layers.1"):
        assert held[f"{layer}.mlp.w1"] == w1_bytes
        assert state[f"{layer}.mlp.w1"] == 2 * w1_bytes + 4  # two moments, and a count of steps
    assert held["tok_embeddings"] == held["output"] == 4 * 2048 * 128 // 2
    assert set(held) >= set(state)


def test_gathered_parameters_belong_to_the_module_that_reads_them(planned_and_traced: Any) -> None:
    _, events = planned_and_traced["full, 2 ranks"]
    gathered = _bytes(events, "gathered parameters", before_step=False)
    w1_bytes = 4 * 384 * 128
    assert gathered["layers.0.mlp.w1"] == 2 * w1_bytes  # in forward and in backward
    assert gathered["tok_embeddings"] % (4 * 2048 * 128) == 0
    assert gathered["layers.0"] >= w1_bytes  # the buffer of the whole layer


def test_each_layer_has_the_same_activations_in_forward_and_in_backward(planned_and_traced: Any) -> None:
    _, events = planned_and_traced["full, 2 ranks"]
    made: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for one in events.allocations:
        phase = events.operations[max(one.made, 0)].phase
        if one.made != BEFORE_STEP and one.kind == "activations" and phase in made:
            made[phase][one.module] += one.num_bytes
    for found in made.values():
        for part in ("mlp.w1", "mlp.w2", "attn.q_proj", "attn"):
            assert found[f"layers.0.{part}"] == found[f"layers.1.{part}"] > 0
    assert made["backward"]["loss"] > 0


def test_compiled_code_is_named_and_belongs_to_its_layer_or_the_loss(planned_and_traced: Any) -> None:
    _, events = planned_and_traced["compiled lora"]
    found = {operation for operation in events.operations if operation.name.startswith("compiled ")}
    layers = ["layers.0", "layers.1"]
    assert found == {
        *(Operation("compiled forward", "forward", layer) for layer in layers),
        *(Operation("compiled backward", "backward", layer) for layer in layers),
        Operation("compiled forward", "loss", "loss"),
        Operation("compiled backward", "backward", "loss"),
    }
    assert not any(operation.name == "aten.empty_strided.default" for operation in events.operations)

"""Host memory of a machine: what a checkpoint's conversion copies, and what a run holds in each activity."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune.models.convert_weights import hf_to_tune, tune_to_hf
from torchtune.models.llama2 import llama2
from torchtune.models.phi3 import phi3
from torchtune.models.phi3._convert_weights import phi3_hf_to_tune, phi3_tune_to_hf
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune, qwen2_tune_to_hf

from torchtune_adaptive.plan.host_memory import (
    CUDA_PROCESS_BYTES,
    PROCESS_BYTES,
    HostFigures,
    HostPlan,
    plan_host,
)
from torchtune_adaptive.plan.trace.host_figures import host_figures
from torchtune_adaptive.plan.trace.offloaded_activations import OffloadedActivations

HEADS, KV_HEADS, WIDTH = 4, 2, 32
GEOMETRY = {
    "vocab_size": 11,
    "num_layers": 2,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "embed_dim": WIDTH,
    "intermediate_dim": 48,
    "max_seq_len": 16,
}
_OF_HEADS = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "dim": WIDTH}
StateDict = dict[str, torch.Tensor]
Convert = Callable[[StateDict], StateDict]
CONVERSIONS: dict[str, tuple[Callable[..., nn.Module], Convert, Convert]] = {
    "LLAMA3": (llama2, partial(tune_to_hf, **_OF_HEADS), partial(hf_to_tune, **_OF_HEADS)),
    "QWEN2": (qwen2, partial(qwen2_tune_to_hf, **_OF_HEADS), partial(qwen2_hf_to_tune, **_OF_HEADS)),
    "PHI3_MINI": (phi3, phi3_tune_to_hf, partial(phi3_hf_to_tune, **_OF_HEADS)),
}


def _cfg(model_type: str = "LLAMA3", checkpointer: str = "FullModelHFCheckpointer", **more: Any) -> DictConfig:
    component = f"torchtune.training.{checkpointer}"
    return OmegaConf.create({"checkpointer": {"_component_": component, "model_type": model_type}} | more)


def _figures(cfg: DictConfig, *models: nn.Module, optimizers: Any = (), sizes: Any = ()) -> HostFigures:
    flat = host_figures(cfg, models, optimizers, activation_bytes_per_token=sizes)
    return HostFigures.from_flat(flat)


def _copied_bytes(convert: Convert, before: StateDict) -> int:
    """Bytes of the new tensors that ``convert`` creates."""
    there = {tensor.untyped_storage().data_ptr() for tensor in before.values()}
    made = [one for one in convert(before).values() if one.untyped_storage().data_ptr() not in there]
    return sum(one.nbytes for one in made)


@pytest.mark.parametrize("model_type", CONVERSIONS)
def test_what_torchtune_copies_when_it_converts_a_checkpoint_is_counted(model_type: str) -> None:
    build, to_hf, from_hf = CONVERSIONS[model_type]
    model = build(**GEOMETRY)
    figures = _figures(_cfg(model_type), model)
    assert figures.load_copies == _copied_bytes(from_hf, to_hf(model.state_dict()))
    assert figures.save_copies == _copied_bytes(to_hf, model.state_dict())
    assert figures.weights == sum(parameter.nbytes for parameter in model.parameters())


def test_a_checkpointer_that_does_not_convert_copies_nothing() -> None:
    model = llama2(**GEOMETRY)
    figures = _figures(_cfg(checkpointer="FullModelTorchTuneCheckpointer"), model)
    assert (figures.load_copies, figures.save_copies) == (0, 0)
    assert _figures(_cfg(save_adapter_weights_only=True), model).save_copies == 0


@pytest.mark.parametrize("key", ["ref_checkpointer", "teacher_checkpointer"])
def test_a_frozen_models_checkpoint_is_converted_by_its_own_checkpointer(key: str) -> None:
    trained, frozen = llama2(**GEOMETRY), llama2(**GEOMETRY).requires_grad_(False)
    others = _cfg().checkpointer
    figures = _figures(_cfg("QWEN2", **{key: others}), trained, frozen)
    assert (figures.load_copies, figures.frozen_load_copies) == (0, _figures(_cfg(), trained).load_copies)
    assert figures.local == 2 * _figures(_cfg(), trained).local
    buffers = sum(buffer.nbytes for model in (trained, frozen) for buffer in model.buffers())
    assert figures.trained == figures.weights + buffers


def test_offloaded_parameters_and_gradients_are_pinned_and_their_state_is_not() -> None:
    model = nn.Linear(3, 5)  # 60 bytes and 20
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    figures = _figures(_cfg(fsdp_cpu_offload=True), model, optimizers=[optimizer])
    state = 2 * 80 + 2 * 4  # and the counts of steps
    assert (figures.offloaded_weights, figures.offloaded) == (64 + 32, 2 * (64 + 32) + state)
    assert (figures.state, figures.whole_state) == (state, state)
    assert _figures(_cfg(), model, optimizers=[optimizer]).offloaded == 0


def test_activations_offloaded_by_one_forward_pass_are_counted() -> None:
    offloaded = OffloadedActivations()
    for rows in (64, 128):
        with offloaded:
            loss = (torch.ones(rows, 8, requires_grad=True).exp().exp()).sum()
        loss.backward()
        assert offloaded.host_bytes == [rows * 32] * 2
    figures = _figures(_cfg(), nn.Linear(1, 1), sizes=[32, 32, 8])
    assert figures.activation_bytes(100) == 2 * 4096 + 1024


# ---- by activity of a run

FIGURES = HostFigures(
    weights=1000, frozen_weights=500, load_copies=30, frozen_load_copies=7, save_copies=20, local=400, trained=250
)
WITH_STATE = replace(FIGURES, state=600, whole_state=4800)


def _planned(figures: HostFigures = WITH_STATE, **changes: Any) -> HostPlan:
    usual: dict[str, Any] = {"world_size": 16, "ranks": 8, "on_cpu": False, "saves_state": True}
    usual |= {"saves_in_background": False, "step_bytes": 9000, "num_tokens": 1}
    return plan_host(figures, **(usual | changes))


def test_each_rank_copies_to_load_and_to_search_and_the_first_gathers_to_save() -> None:
    found = _planned()
    assert found.tensor_bytes == {
        "loading": 8 * 37,
        "search": 8 * 250,
        "search again": 8 * 850,
        "training": 0,
        "saving": 1000 + 20 + 4800,
    }
    assert found.process_bytes == 8 * (PROCESS_BYTES + CUDA_PROCESS_BYTES)
    assert found.peak_bytes == found.process_bytes + 8 * 850
    assert (found.file_bytes, found.temporary_file_bytes) == (1500, 0)


def test_the_last_epochs_checkpoint_has_no_state_and_those_in_the_background_are_copies_of_every_rank() -> None:
    assert _planned(saves_state=False).tensor_bytes["saving"] == 1020
    assert _planned(saves_in_background=True).tensor_bytes["saving"] == 8 * 850


def test_what_is_offloaded_is_held_from_the_first_step_on_and_not_copied() -> None:
    found = _planned(replace(WITH_STATE, offloaded_weights=512, offloaded=2000))
    assert found.tensor_bytes == {
        "loading": 8 * (512 + 37),
        "search": 8 * 2000,
        "search again": 8 * 2000,
        "training": 8 * 2000,
        "saving": 8 * 2000 + 5820,
    }
    assert found.temporary_file_bytes == 8 * (250 + 600)


def test_offloaded_activations_grow_with_tokens_by_powers_of_two() -> None:
    figures = HostFigures(activations={"24": 3})
    assert [_planned(figures, num_tokens=n).tensor_bytes["training"] for n in (1, 10, 11)] == [768, 6144, 12288]


def test_on_a_cpu_a_rank_computes_in_host_memory_and_the_search_copies_to_a_file() -> None:
    found = _planned(world_size=2, ranks=2, on_cpu=True)
    assert found.process_bytes == 2 * PROCESS_BYTES
    assert found.tensor_bytes == {
        "loading": 2 * 437,
        "search": 2 * 9000,
        "search again": 2 * 9000,
        "training": 2 * 9000,
        "saving": 2 * 1000 + 5820,
    }
    assert found.temporary_file_bytes == 2 * (250 + 600)
    alone = _planned(world_size=1, ranks=1, on_cpu=True)
    assert alone.tensor_bytes["saving"] == 1000 + 20  # it gathers only its own state

"""Published peaks of GPU memory: every point has its quantity and source, and is compared with a plan."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torchtune.models.llama3_2._component_builders import llama3_2
from torchtune.modules import RMSNorm

from benchmarks import models_before_0_5
from benchmarks.published_points import GIB, Compared, Point, document, planned_bytes, read_points
from tests.support.plans import cfg_of, peaks, planned, step_of
from torchtune_adaptive.plan.gpu import CONTEXT_BYTES, FRAGMENTATION, ONE_RANK_NCCL_BYTES, WORKSPACE_BYTES
from torchtune_adaptive.stock.configs import load_config, method_of

UNITS = {"GiB": GIB, "GB": 10**9, "MiB": 2**20, "bytes": 1}
POINTS = read_points()


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_point_has_its_source_and_the_figure_is_in_the_quotation(point: Point) -> None:
    assert re.match(r"https://[\w.-]+/\S+$", point.source)
    figure = f"{point.bytes / UNITS[point.unit]:.14g}"
    assert any(float(number) == pytest.approx(float(figure)) for number in re.findall(r"\d+(?:\.\d+)?", point.quote))
    assert point.quantity in ("allocated", "active", "reserved", "nvidia-smi")
    assert all([point.name, point.group, point.gpu, point.nproc_per_node > 0])


def test_a_well_specified_point_has_all_that_a_plan_needs() -> None:
    for point in POINTS:
        assert (point.seq_len is None) <= (point.missing is not None), point.name
        if point.well_specified:
            assert point.missing is None, point.name
            assert {"dataset.packed=True", f"tokenizer.max_seq_len={point.seq_len}"} <= set(point.config["overrides"])


@pytest.mark.parametrize("run", sorted({point.run[:2] for point in POINTS}), ids=lambda run: run[0])
def test_the_config_of_a_point_exists_and_takes_its_overrides(run: tuple[str, tuple[str, ...]]) -> None:
    cfg = load_config(*run)
    method_of(cfg)
    assert cfg.batch_size > 0


def test_planned_bytes_are_those_of_the_published_quantity() -> None:
    step = step_of(peaks(1024, held_bytes=10 * GIB, bytes_per_row=0), attention_width=0)
    found = planned(cfg_of(), step, batch_sizes=[2])
    allocated_bytes = 10 * GIB + WORKSPACE_BYTES
    reserved_bytes = allocated_bytes * (1 + FRAGMENTATION)
    for quantity in ("allocated", "active"):
        assert planned_bytes(found, quantity) == pytest.approx(allocated_bytes)
    assert planned_bytes(found, "reserved") == pytest.approx(reserved_bytes)
    assert planned_bytes(found, "nvidia-smi") == pytest.approx(reserved_bytes + CONTEXT_BYTES + ONE_RANK_NCCL_BYTES)


def test_the_document_keeps_well_specified_points_apart_and_says_why_others_have_no_plan() -> None:
    point = replace(POINTS[0], name="a run, allocated", group="some", quantity="allocated", bytes=10 * GIB)
    known = replace(point, well_specified=True)
    reserved = replace(known, name="a run, reserved", quantity="reserved", bytes=12 * GIB)
    compared = [
        Compared(known, 11.0 * GIB),
        Compared(reserved, 12.0 * GIB),
        Compared(replace(point, well_specified=False, name="another, loose", gpu="another"), 5.0 * GIB),
        Compared(replace(point, well_specified=False, name="a fourth", gpu="a fourth"), 11.0 * GIB),
        Compared(replace(point, name="a third", gpu="a third"), reason="no rows"),
    ]
    text = "\n".join(document(compared))
    assert "| some | 2 | 5.0 % | +10.0 % | 2 | 30.0 % | -50.0 % |" in text
    parts = ["Well specified:", "a run, allocated", "Others:", "another, loose"]
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
    assert f"| a run | {point.gpu} | 1 | 10.00 | 12.00 | 20.0 % |" in text
    assert "- a third: no rows" in text


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_earlier_norms_compute_the_same_and_keep_two_bytes_less_of_each_value() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    kept_bytes: dict[type, int] = {}
    outputs = []
    for kind in (RMSNorm, models_before_0_5.EarlierNorm):
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs.append(kind(64).bfloat16()(x))
        kept_bytes[kind] = sum(saved.values())
    torch.testing.assert_close(*outputs)
    assert kept_bytes[RMSNorm] - kept_bytes[models_before_0_5.EarlierNorm] == 2 * x.numel()


def test_an_earlier_model_is_built_of_earlier_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"vocab_size": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "embed_dim": 8}
    sizes |= {"max_seq_len": 8, "intermediate_dim": 8}
    monkeypatch.setattr(models_before_0_5, "llama3_2_3b_of_0_6", lambda: llama3_2(**sizes))
    norms = [type(module) for module in models_before_0_5.llama3_2_3b().modules() if isinstance(module, RMSNorm)]
    assert norms == [models_before_0_5.EarlierNorm] * 3

"""The overhead of a GPU: its arithmetic, how its figures compare, and the refusal of bad calibrations."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.support.plans import CALIBRATION, GIB
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.gpu import (
    CALIBRATED_UNCERTAINTY_BYTES,
    EXPANDABLE_FRAGMENTATION,
    KNOWN_GPUS,
    NCCL_BYTES,
    Calibration,
    Card,
    Overhead,
    memory_of,
)

GB = 10**9

overheads = st.builds(
    Overhead,
    outside_bytes=st.floats(0, 4 * GIB),
    workspace_bytes=st.floats(0, GIB),
    bytes_per_token=st.floats(0, 1e5),
    fragmentation=st.floats(0, 1),
)


# ---- sums


def test_a_process_may_use_no_more_than_the_limit_even_if_it_holds_more_outside_the_allocator() -> None:
    overhead = Overhead(outside_bytes=300)
    assert [overhead.usable_bytes(limit, 0.25) for limit in (100, 300, 700)] == [100, 300, 600]


# ---- the kinds of overhead


def test_a_single_rank_has_a_communicator_and_more_ranks_a_larger_one() -> None:
    one, two, many = (Overhead.default(world_size).outside_bytes for world_size in (1, 2, 64))
    assert one > 512 * 2**20  # what NCCL alone takes for one rank
    assert one < two == many


def test_several_of_amds_gpus_hold_more_outside_the_allocator() -> None:
    ours, others = (Overhead.default(8, on_amd=on_amd) for on_amd in (True, False))
    assert 13.58e9 < ours.outside_bytes + 5.6484 * GIB < 14e9  # published for 8 MI355X: process and reserved bytes
    assert others.outside_bytes < 2 * GIB
    assert Overhead.default(1, on_amd=True) == Overhead.default(1)


def test_expandable_segments_add_less() -> None:
    plain, expandable = Overhead.default(1), Overhead.default(1, expandable_segments=True)
    assert expandable.reserved_bytes(10 * GIB) < plain.reserved_bytes(10 * GIB)


def test_attention_takes_scratch_memory_in_the_backward_pass_alone() -> None:
    plain, wide = Overhead.default(1), Overhead.default(1, attention_width=4096)
    scratch = 8192 * wide.bytes_per_token
    for phases, added in (
        ({"loss": 10 * GIB}, 0),
        ({"backward": 10 * GIB}, scratch),
        ({"loss": 10 * GIB, "backward": 10 * GIB - 2**20}, scratch - 2**20),
        ({"loss": 10 * GIB, "backward": 9 * GIB}, 0),
    ):
        assert wide.allocated_bytes(phases, num_tokens=8192) == plain.allocated_bytes(phases, num_tokens=8192) + added


@pytest.mark.parametrize(("num_heads", "head_dim"), [(32, 128), (64, 128), (32, 64), (8, 32)])
def test_the_scratch_of_a_token_holds_the_queries_gradient_and_the_softmax_in_float32(
    num_heads: int, head_dim: int
) -> None:
    needed = 4 * num_heads * head_dim + 4 * num_heads
    taken = Overhead.default(1, attention_width=num_heads * head_dim).bytes_per_token
    assert needed <= taken <= 1.04 * needed


def test_an_uncalibrated_forecast_is_uncertain_by_a_fraction_but_by_no_less_than_one_gib() -> None:
    one, several = Overhead.default(1), Overhead.default(8)
    assert one.uncertainty_bytes_at(10 * GIB) == GIB
    assert one.uncertainty_bytes_at(50 * GIB) == 3 * GIB
    assert several.uncertainty_bytes_at(50 * GIB) == 5 * GIB
    assert "published" in several.source


def test_the_allocator_of_several_ranks_has_more_that_it_cannot_use() -> None:
    one, several = (Overhead.default(ranks).reserved_bytes(10 * GIB) for ranks in (1, 8))
    assert several > 1.05 * one
    allocated = [Overhead.default(ranks).allocated_bytes({"backward": 10 * GIB}) for ranks in (1, 8)]
    assert allocated[0] == allocated[1] > 10 * GIB


@pytest.mark.parametrize("field", ["outside_bytes", "workspace_bytes", "fragmentation", "uncertainty_fraction"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "1"])
def test_a_figure_that_is_not_a_number_from_zero_up_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        Overhead(**{field: value})
    assert str(caught.value) == f"`{field}` must be a number from 0 up, but is {value!r} instead."


@pytest.mark.parametrize("world_size", [0, 1.5])
def test_a_world_size_below_one_is_refused(world_size: Any) -> None:
    with pytest.raises(InputError, match="`world_size`"):
        Overhead.default(world_size)


# ---- calibrations


def test_an_overhead_has_the_figures_of_its_calibration_and_less_uncertainty() -> None:
    overhead = Overhead.calibrated(CALIBRATION, 1, attention_width=4096)
    assert overhead.outside_bytes == CALIBRATION.context_bytes + CALIBRATION.nccl_bytes
    assert overhead.reserved_bytes(overhead.allocated_bytes({"loss": 0})) == pytest.approx(GIB * 1.5)
    assert overhead.allocated_bytes({"backward": 0}, num_tokens=10) == GIB + 10 * 2 * 100_000
    assert "calibrated on H100 (1, torch 2, native)" in overhead.source
    assert overhead.uncertainty_bytes_at(0) == CALIBRATION.misfit_bytes
    assert overhead.uncertainty_bytes_at(90 * GIB) < Overhead.default(1).uncertainty_bytes_at(90 * GIB)


def test_more_ranks_have_at_least_the_usual_nccl_fragmentation_and_uncertainty() -> None:
    """A calibration measures one rank."""
    measured = dataclasses.replace(CALIBRATION, nccl_bytes=5, misfit_bytes=5, fragmentation=0.01)
    overhead, usual = Overhead.calibrated(measured, 8), Overhead.default(8)
    assert overhead.outside_bytes == CALIBRATION.context_bytes + NCCL_BYTES
    assert overhead.uncertainty_bytes == CALIBRATED_UNCERTAINTY_BYTES
    assert overhead.fragmentation == usual.fragmentation > 0.01
    assert overhead.uncertainty_fraction == usual.uncertainty_fraction
    expandable = dataclasses.replace(measured, backend="native, expandable_segments:True")
    assert Overhead.calibrated(expandable, 8).fragmentation == EXPANDABLE_FRAGMENTATION
    assert Overhead.calibrated(dataclasses.replace(measured, fragmentation=0.4), 8).fragmentation == 0.4


OF_A100 = dataclasses.replace(CALIBRATION, gpu="NVIDIA A100-SXM4-80GB", backend="native, default")


@pytest.mark.parametrize("name", ["A100-80GB", "a100 80gb", "80GiB"])
def test_a_calibration_is_for_the_gpu_that_was_measured_or_for_any_of_a_given_size(name: str, tmp_path: Path) -> None:
    OF_A100.write(tmp_path / "file.json")
    assert Card.named(name, calibration=tmp_path / "file.json").calibration == OF_A100


def test_a_calibration_of_another_gpu_is_refused(tmp_path: Path) -> None:
    OF_A100.write(tmp_path / "file.json")
    with pytest.raises(InputError) as caught:
        Card.named("h100", calibration=tmp_path / "file.json")
    assert str(caught.value) == (
        "`--calibration` must be of the GPU that is planned, H100 80GB, but is of 'NVIDIA A100-SXM4-80GB' instead."
    )


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_calibration_with_other_settings_of_the_allocator_is_refused(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OF_A100.write(tmp_path / "file.json")
    monkeypatch.setenv(variable, "expandable_segments:True")
    with pytest.raises(InputError) as caught:
        Card.named("A100-80GB", calibration=tmp_path / "file.json")
    assert str(caught.value) == (
        "`PYTORCH_ALLOC_CONF` must be as it was when the GPU was calibrated (default), but is"
        " 'expandable_segments:True' instead."
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        pytest.param("[" * 100_000, "cannot be read", id="deep"),
        ("[]", "must be of version 1"),
        ("{}", "must be of version 1"),
        ('{"version": 2}', "is of 2 instead"),
        ('{"version": 1}', "`gpu` of a calibration must be text, but is None"),
    ],
)
def test_a_file_that_is_not_a_calibration_is_refused_in_one_sentence_that_names_it(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        Calibration.read(path)
    message = str(caught.value)
    assert reason in message
    assert "file.json" in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nccl_bytes", -1),
        ("fragmentation", math.nan),
        ("misfit_bytes", 10**400),
        ("bytes_per_token", "8"),
        ("driver", 580),
    ],
)
def test_a_bad_value_in_a_calibration_is_refused_by_its_name(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "file.json"
    CALIBRATION.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(InputError, match=f"`{field}` of a calibration must be"):
        Calibration.read(path)


# ---- known GPUs


@pytest.mark.parametrize("name", KNOWN_GPUS)
def test_every_known_name_is_found_in_any_case_and_with_any_separator(name: str) -> None:
    expected = KNOWN_GPUS[name].memory_bytes
    spellings = [name, name.lower(), name.replace(" ", ""), name.replace(" ", "-"), f" NVIDIA_{name.upper()} "]
    assert [memory_of(spelling) for spelling in spellings] == [expected] * len(spellings)


@pytest.mark.parametrize(
    ("torchs_name", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("h100", "H100 80GB"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_the_name_that_torch_gives_a_gpu_is_known(torchs_name: str, name: str) -> None:
    assert memory_of(torchs_name) == KNOWN_GPUS[name].memory_bytes


@pytest.mark.parametrize("name", KNOWN_GPUS)
def test_no_gpu_has_more_than_its_name_says_in_binary_units_and_each_has_a_source(name: str) -> None:
    gpu = KNOWN_GPUS[name]
    sold_gb = {"T4": 16, "A10": 24, "A10G": 24, "A30": 24, "A40": 48, "RTX 3090": 24, "RTX 4090": 24, "RTX 5090": 32}
    sold_gb |= {"RTX 6000 Ada": 48, "L4": 24, "L40": 48, "L40S": 48, "H100 NVL": 94, "H200": 141, "B200": 180}
    sold_gb |= {"MI300X": 192, "MI355X": 288}
    named = re.search(r"([0-9]+)GB$", name)
    sold = int(named[1]) if named else sold_gb[name]
    assert 0.95 * sold * GB < gpu.memory_bytes < sold * GIB
    assert re.fullmatch(r"(seen by (CUDA|HIP)|reported by the driver, minus [0-9]+ MiB): https://[^ ]+", gpu.source)


def test_a_size_is_taken_as_it_is() -> None:
    assert [memory_of(text) for text in ("80GiB", "80 GB", "85899345920")] == [80 * GIB, 80 * GB, 80 * GIB]


@pytest.mark.parametrize(
    ("text", "sizes"), [("A100", ["A100 40GB", "A100 80GB"]), ("tesla v100", ["V100 16GB", "V100 32GB"])]
)
def test_a_name_of_several_sizes_is_refused_with_their_names(text: str, sizes: list[str]) -> None:
    with pytest.raises(InputError, match="must name its memory") as caught:
        memory_of(text)
    assert repr(text) in str(caught.value)
    assert all(size in str(caught.value) for size in sizes)


@pytest.mark.parametrize(
    ("text", "meant"), [("H101", "H100 80GB"), ("rtx 4080", "RTX 4090"), ("a100-81gb", "A100 80GB")]
)
def test_an_unknown_name_is_quoted_and_a_close_one_is_suggested(text: str, meant: str) -> None:
    with pytest.raises(InputError, match="did you mean") as caught:
        memory_of(text)
    assert f"but is {text!r} instead; did you mean" in str(caught.value)
    assert f"`{meant}`" in str(caught.value)


@pytest.mark.parametrize("text", ["", "abacus", "-5GiB", "80", "80 parsecs", "NVIDIA"])
def test_a_text_that_is_neither_name_nor_size_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(InputError) as caught:
        memory_of(text)
    message = str(caught.value)
    assert message.startswith("`memory` must be a size like 80GiB or one of T4, ")
    assert f"but is {text!r} instead" in message
    assert message.endswith((".", "?"))
    assert "\n" not in message

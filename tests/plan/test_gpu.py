"""What a process has on a GPU beside its tensors, and the memory of the GPUs that are known by name."""

import re

import pytest

from tests.support.plans import GIB, MIB
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.gpu import KNOWN_GPUS, Card, memory_of

GB = 10**9


# ---- beside tensors


def test_nccl_counts_only_where_the_run_makes_a_group() -> None:
    card = Card.named("H100")
    alone, in_group, two, many = (
        (one.least_outside_bytes, one.most_outside_bytes)
        for one in (card.overhead(1, has_group=False), card.overhead(1), card.overhead(2), card.overhead(64))
    )
    assert alone == tuple(MIB * mib for mib in KNOWN_GPUS["H100 80GB"].context_mib or ())
    assert in_group[0] - alone[0] == 512 * MIB  # what NCCL takes for one rank
    assert two == many
    assert two[1] > in_group[1]


@pytest.mark.parametrize("name", sorted(KNOWN_GPUS.keys() - {"MI300X", "MI355X"}))
def test_every_card_has_a_context_of_its_own_and_one_of_unknown_name_that_of_any(name: str) -> None:
    known, unknown = (Card.named(one).overhead(1, has_group=False) for one in (name, "80GiB"))
    assert 0 < known.least_outside_bytes <= known.most_outside_bytes < GIB
    assert unknown.least_outside_bytes <= known.least_outside_bytes
    assert known.most_outside_bytes <= unknown.most_outside_bytes


@pytest.mark.parametrize(("name", "mib"), [("T4", 8.125), ("A100-80GB", 8.125), ("RTX 4090", 8.125), ("H200", 32)])
def test_each_of_two_threads_has_a_workspace_of_its_architecture(name: str, mib: float) -> None:
    assert Card.named(name).overhead(1).workspaces == (int(mib * MIB),) * 2


def test_amds_gpus_hold_more_outside_the_allocator() -> None:
    ours = Card.named("MI355X").overhead(8)
    for published in (13.6e9, 14.0e9):  # processes on 8 MI355X that had 5.65 GiB reserved
        assert ours.least_outside_bytes - GIB < published - 5.65 * GIB < ours.most_outside_bytes + GIB


@pytest.mark.parametrize(
    ("text", "expandable", "lacking"),
    [
        ("", False, ""),
        ("pinned_use_background_threads:True, expandable_segments:True", True, ""),
        (" expandable_segments : True ", True, ""),
        ("expandable_segments:False", False, ""),
        ("backend:native", False, ""),
        ("large_segment_size_mb:40", False, "large_segment_size_mb:40"),
        ("max_split_size_mb:128, backend:cudaMallocAsync", False, "max_split_size_mb:128, backend:cudaMallocAsync"),
        ("per_process_memory_fraction:0.5", False, "per_process_memory_fraction:0.5"),
        (
            "expandable_segments:True, roundup_power2_divisions: [256:1, 512:2], backend: native",
            True,
            "roundup_power2_divisions:[256:1,512:2]",
        ),
    ],
)
def test_the_allocators_settings_are_those_of_the_environment(
    text: str, expandable: bool, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF" if expandable else "PYTORCH_ALLOC_CONF", text)
    overhead = Card.named("H100").overhead(1)
    assert overhead.expandable == expandable
    assert overhead.note.startswith(f"Reserved bytes are those without {lacking}, ") if lacking else not overhead.note


def test_a_setting_with_which_torch_does_not_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:true")
    with pytest.raises(InputError) as caught:
        Card.named("H100")
    expected = "`expandable_segments` of torch's allocator must be True or False, but is 'true' instead."
    assert str(caught.value) == expected


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
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_the_name_that_torch_gives_a_gpu_is_known(torchs_name: str, name: str) -> None:
    assert memory_of(torchs_name) == KNOWN_GPUS[name].memory_bytes


@pytest.mark.parametrize("name", KNOWN_GPUS)
def test_no_gpu_has_more_than_its_name_says_in_binary_units(name: str) -> None:
    sold_gb = {"T4": 16, "A10": 24, "A10G": 24, "A30": 24, "A40": 48, "RTX 3090": 24, "RTX 4090": 24, "RTX 5090": 32}
    sold_gb |= {"RTX 6000 Ada": 48, "L4": 24, "L40": 48, "L40S": 48, "H100 NVL": 94, "H200": 141, "B200": 180}
    sold_gb |= {"MI300X": 192, "MI355X": 288}
    named = re.search(r"([0-9]+)GB$", name)
    sold = int(named[1]) if named else sold_gb[name]
    assert 0.95 * sold * GB < KNOWN_GPUS[name].memory_bytes < sold * GIB


def test_a_size_is_taken_as_it_is() -> None:
    assert [memory_of(text) for text in ("80GiB", "80 GB", "85899345920")] == [80 * GIB, 80 * GB, 80 * GIB]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, ["`memory` must be a size like 80GiB or one of T4, "]) for text in ("", "abacus", "-5GiB", "80")),
        ("tesla v100", ["must name its memory", "V100 16GB", "V100 32GB"]),  # it is sold with either
        ("a100-81gb", ["; did you mean", "`A100 80GB`"]),
        ("24G", ["; did you mean `24GiB`?"]),
    ],
)
def test_a_text_that_is_no_size_and_no_clear_name_is_quoted_and_refused_in_one_sentence(
    text: str, words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        memory_of(text)
    message = str(caught.value)
    assert [word for word in (f"but is {text!r} instead", *words) if word not in message] == []
    assert message.endswith((".", "?"))
    assert "\n" not in message

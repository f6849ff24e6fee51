"""Names and sizes of GPUs: every spelling finds the same GPU, and an unclear one is refused."""

import re

import pytest

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.gpus import KNOWN_GPUS, memory_of

GB, GIB = 10**9, 2**30


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

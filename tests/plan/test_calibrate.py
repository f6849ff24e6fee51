"""A calibration of a fake GPU with known properties, and its train step on the CPU and over fake tensors."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.calibrate import (
    BATCH_SIZES,
    CALIBRATION_MODEL,
    CalibrationLoop,
    MeasuredCard,
    StepPeak,
    calibrate,
    fit_residuals,
    measure_fragmentation,
    measure_nccl_bytes,
)
from torchtune_adaptive.plan.gpu import Calibration, Overhead

MIB, GIB = 2**20, 2**30


@dataclass
class FakeCard(MeasuredCard):
    """A GPU that allocates what its fields say, and loads kernels when they first run; ``done`` lists what it did."""

    context_bytes: int = 400 * MIB
    product_kernels_bytes: int = 50 * MIB
    step_kernels_bytes: int = 150 * MIB
    nccl_bytes: int = 300 * MIB
    product_workspace_bytes: int = 64 * MIB
    step_workspace_bytes: int = 100 * MIB
    bytes_per_token: int = 8192
    fragmentation: float = 0.125
    done: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, str]:
        return {"gpu": "fake", "driver": "1", "torch": "2", "backend": "native, default"}

    def outside_bytes(self) -> int:
        product = "product" in self.done
        return (
            self.context_bytes + product * self.product_kernels_bytes + ("step" in self.done) * self.step_kernels_bytes
        )

    def outside_bytes_in_a_group(self) -> int:
        self.done.append("group")
        return self.outside_bytes() + self.nccl_bytes

    def workspace_bytes(self) -> int:
        assert not self.done, "a first product must be the first"
        self.done.append("product")
        return self.product_workspace_bytes

    def train(self, loop: CalibrationLoop, batch_size: int) -> StepPeak:
        self.done.append("step")
        tokens = loop.make_batch(batch_size).numel()
        allocated = traced(batch_size) + self.step_workspace_bytes + self.bytes_per_token * tokens
        return StepPeak(tokens, int(allocated), int(allocated * (1 + self.fragmentation)))


def traced(batch_size: int) -> float:
    return 3 * GIB + 1_000_000 * batch_size * CALIBRATION_MODEL["max_seq_len"]


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CalibrationLoop, "traced_bytes", lambda _, batch_sizes: list(map(traced, batch_sizes)))


# ---- a whole calibration


def test_a_calibration_finds_what_the_card_adds_and_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, path = FakeCard(), tmp_path / "out" / "card.json"

    def traced_bytes(_: CalibrationLoop, batch_sizes: Sequence[int]) -> list[float]:
        assert not card.done  # the host traces before the card is used
        return list(map(traced, batch_sizes))

    monkeypatch.setattr(CalibrationLoop, "traced_bytes", traced_bytes)
    measured = calibrate(path, card=card)
    assert card.done == ["product", *["step"] * len(BATCH_SIZES), "group"]  # each is measured when it first runs
    assert Calibration.read(path) == measured
    assert json.loads(path.read_text())["version"] == 1
    assert measured.context_bytes == 600 * MIB  # with the kernels that product and steps loaded
    assert measured.nccl_bytes == 300 * MIB
    assert measured.workspace_bytes == pytest.approx(100 * MIB, abs=2)
    assert measured.bytes_per_token == pytest.approx(8192, rel=1e-6)
    assert measured.attention_width == CALIBRATION_MODEL["embed_dim"]
    assert measured.fragmentation == pytest.approx(0.125, rel=1e-6)
    assert measured.misfit_bytes <= 2
    assert measured.gpu == "fake"


@pytest.mark.usefixtures("tracing")
def test_a_forecast_with_a_calibration_equals_what_the_card_reserves(tmp_path: Path) -> None:
    card = FakeCard()
    calibrate(tmp_path / "card.json", card=card)
    width = CALIBRATION_MODEL["embed_dim"]
    overhead = Overhead.calibrated(Calibration.read(tmp_path / "card.json"), 1, attention_width=width)
    unseen = card.train(CalibrationLoop(), 21)
    allocated = overhead.allocated_bytes({"backward": traced(21)}, num_tokens=unseen.num_tokens)
    assert overhead.reserved_bytes(allocated) == pytest.approx(unseen.reserved_bytes, rel=1e-6)


@pytest.mark.usefixtures("tracing")
def test_the_workspace_is_at_least_that_of_the_matrix_product(tmp_path: Path) -> None:
    card = FakeCard(step_workspace_bytes=0)
    assert calibrate(tmp_path / "a.json", card=card).workspace_bytes == 64 * MIB


# ---- what is refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_one_sentence_says_where_to_run_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        calibrate(tmp_path / "card.json")
    message = str(caught.value)
    assert message.startswith("`tune-adaptive calibrate` must run on a machine with CUDA")
    assert message.count(".") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device_index", [-1, 2])
def test_a_device_that_is_not_there_is_refused(device_index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=rf"`device_index` must be in \[0, 2\), but is {device_index} instead\."):
        calibrate(Path("unwritten.json"), device_index=device_index)
    assert not Path("unwritten.json").exists()


@pytest.mark.usefixtures("tracing")
def test_a_card_that_others_use_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    card = FakeCard(context_bytes=12 * GIB)
    with pytest.raises(InputError, match=r"but 12\.0 GiB of it are in use\.$"):
        calibrate(tmp_path / "card.json", card=card)
    assert not list(tmp_path.iterdir())
    assert not card.done


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    card = FakeCard()
    with pytest.raises(InputError) as caught:
        calibrate(tmp_path, card=card)
    name = str(tmp_path)
    assert str(caught.value).startswith(f"`output` cannot be written: file {name!r}: Is a dir")
    assert not card.done


@pytest.mark.usefixtures("tracing")
def test_a_full_disk_after_the_measurements_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(InputError, match=r"card\.json': OSError: no space left on device\.$"):
        calibrate(tmp_path / "card.json", card=FakeCard())


# ---- single measurements


def test_a_communicator_never_takes_less_than_nothing() -> None:
    assert measure_nccl_bytes(FakeCard(nccl_bytes=-5)) == 0  # another process freed memory meanwhile


def test_fragmentation_is_the_largest_of_the_steps_and_never_negative() -> None:
    assert measure_fragmentation(
        [StepPeak(1, 100, 110), StepPeak(2, 200, 260), StepPeak(3, 300, 310)]
    ) == pytest.approx(0.3)
    assert measure_fragmentation([StepPeak(1, 100, 99)]) == 0.0


@pytest.mark.parametrize("residuals", [(5, 9, 40), (40, 9, 5), (-5, -9, -40), (0, 0, 0), (-3, 90, 10), (7, 7, 7)])
def test_the_fit_is_at_or_above_every_step_by_at_most_its_misfit(residuals: tuple[int, ...]) -> None:
    tokens = (2048, 3072, 8192)
    peaks = [StepPeak(count, 1000 + residual, 0) for count, residual in zip(tokens, residuals, strict=True)]
    constant, bytes_per_token, misfit = fit_residuals(peaks, [1000.0] * 3)
    assert constant >= 0
    assert bytes_per_token >= 0
    for count, residual in zip(tokens, residuals, strict=True):
        assert -1 <= constant + bytes_per_token * count - residual <= misfit + 1  # both are rounded to bytes


# ---- the train step


# torchtune's normalisation gives float32 to a bfloat16 weight, here as on CUDA.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_a_train_step_reaches_every_parameter_and_leaves_no_gradient() -> None:
    torch.manual_seed(0)
    small = {"vocab_size": 50, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 32, "max_seq_len": 16}
    loop = CalibrationLoop(small)
    model = loop.build_model()
    optimizer = loop.build_optimizer(model)
    loop.train_step(model, optimizer, torch.randint(0, 50, (2, 16)))
    parameters = list(model.parameters())
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert all(optimizer.state[parameter]["exp_avg"].any() for parameter in parameters)
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.slow
def test_the_calibrated_model_is_traced_without_its_memory() -> None:
    small, large = CalibrationLoop().traced_bytes([2, 8])
    with torch.device("meta"):
        model = CalibrationLoop().build_model()
    held_bytes = sum(3 * parameter.nbytes for parameter in model.parameters())  # with both moments of AdamW
    assert held_bytes < small < large < 8 * GIB
    assert large - small > 6 * 1024 * 2 * 32_000  # more logits, in bfloat16

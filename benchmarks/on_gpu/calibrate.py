"""Measures what the device adds to traced memory, for the plans of the other parts."""

from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.on_gpu.stage import Section, Stage
from torchtune_adaptive.plan.calibrate import CalibrationLoop, MeasuredCard, StepPeak, calibrate
from torchtune_adaptive.plan.gpu import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    ONE_RANK_NCCL_BYTES,
    WORKSPACE_BYTES,
    Calibration,
)
from torchtune_adaptive.text import format_bytes

HEADER = ["figure", "measured", "taken without a calibration"]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Measure the device as `tune-adaptive calibrate` does."""
    card = PretendedCard() if stage.is_rehearsal else None
    found = calibrate(stage.calibration_path, card=card)
    text = [f"{found.gpu}, driver {found.driver}, torch {found.torch}, allocator {found.backend}."]
    if stage.is_rehearsal:
        text.append("No device was measured: the figures are pretended.")
    yield [
        Section(
            title="What the device adds to a plan", header=HEADER, rows=_rows(found), text=text, data=[asdict(found)]
        )
    ]


def _rows(found: Calibration) -> list[list[str]]:
    return [
        ["CUDA context and kernels", format_bytes(found.context_bytes), format_bytes(CONTEXT_BYTES)],
        ["NCCL, one rank", format_bytes(found.nccl_bytes), format_bytes(ONE_RANK_NCCL_BYTES)],
        ["workspaces", format_bytes(found.workspace_bytes), format_bytes(WORKSPACE_BYTES)],
        ["bytes per token", f"{found.bytes_per_token:.0f}", ""],
        ["reserved above allocated", f"{found.fragmentation:.1%}", f"{FRAGMENTATION:.1%}"],
        ["largest miss of these figures", format_bytes(found.misfit_bytes), ""],
    ]


class PretendedCard(MeasuredCard):
    """A device that adds nothing."""

    def describe(self) -> dict[str, str]:
        return {"gpu": "none", "driver": "none", "torch": "any", "backend": "none"}

    def outside_bytes(self) -> int:
        return 0

    def outside_bytes_in_a_group(self) -> int:
        return 0

    def workspace_bytes(self) -> int:
        return 0

    def train(self, loop: CalibrationLoop, batch_size: int) -> StepPeak:
        (peak_bytes,) = loop.traced_bytes([batch_size])
        return StepPeak(loop.make_batch(batch_size).numel(), round(peak_bytes), round(peak_bytes))

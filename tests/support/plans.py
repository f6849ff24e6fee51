"""Plans for tests: a step of known bytes in place of a traced one, and the tables of a text."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.engine.memory.timeline import Line, Timeline
from torchtune_adaptive.plan.config_plan import ConfigLaunch
from torchtune_adaptive.plan.decide import Plan
from torchtune_adaptive.plan.gpu import NCCL_BYTES, Calibration, Card
from torchtune_adaptive.plan.trace.peaks import Moment, StepPeaks, TracedStep
from torchtune_adaptive.plan.trace.recorder import KINDS
from torchtune_adaptive.plan.trace.tracer import Tracer

MIB, GIB = 2**20, 2**30
ATTENTION_WIDTH = 4096
CALIBRATION = Calibration(
    gpu="H100",
    driver="1",
    torch="2",
    backend="native",
    context_bytes=3 * GIB,
    nccl_bytes=2 * NCCL_BYTES,
    workspace_bytes=GIB,
    bytes_per_token=100_000,
    attention_width=2048,
    fragmentation=0.5,
    misfit_bytes=GIB,
)
_OPERATIONS = (
    "aten.mm.default",
    "aten.mm.default",
    "aten.nll_loss_forward.default",
    "aten.mm.default",
    "aten.add_.Tensor",
)
_LIVE_MIB = {
    "parameters": (2, 2, 2, 2, 2),
    "optimizer state": (4, 4, 4, 4, 4),
    "activations": (3, 6, 14, 6, 3),
    "gradients": (0, 0, 0, 5, 0),
}
# A whole step of 4 rows, with its peak of 20 MiB in the loss.
STEP = {
    kind: Timeline(
        4,
        _OPERATIONS,
        tuple(MIB * live for live in _LIVE_MIB.get(kind, (0,) * len(_OPERATIONS))),
        ("forward", "forward", "loss", "backward", "optimizer"),
    )
    for kind in KINDS
}


def peaks(seq_len: int, *, held_bytes: float, bytes_per_row: float, single_row_bytes: float | None = None) -> StepPeaks:
    """A step of two phases: both hold ``held_bytes`` of parameters, and backward the rows' activations."""

    def moment(phase: str, parameters: Line, activations: Line) -> Moment:
        return Moment(phase, "mm", {"parameters": parameters, "activations": activations})

    single = held_bytes + bytes_per_row if single_row_bytes is None else single_row_bytes
    grown = Line(held_bytes, 0), Line(0, bytes_per_row)
    alone = Line(held_bytes, 0), Line(single - held_bytes, 0)
    optimizer = moment("optimizer", Line(held_bytes, 0), Line(0, 0))
    return StepPeaks(
        seq_len, (moment("backward", *grown), optimizer), single_row=(moment("backward", *alone), optimizer)
    )


def step_of(*lengths: StepPeaks, **changes: Any) -> TracedStep:
    figures: dict[str, Any] = {
        "num_layers": 32,
        "traced_layers": (4, 6),
        "num_parameters": 8_030_000_000,
        "paged_bytes": 0,
        "attention_width": ATTENTION_WIDTH,
    }
    return TracedStep(lengths, **(figures | changes))


class Asked(NamedTuple):
    cfg: DictConfig
    world_size: int
    seq_lens: tuple[int, ...]


class FakeTracer(Tracer):
    """Returns the step that ``step_for`` gives, and remembers what it was asked."""

    def __init__(self, step_for: Callable[[Asked], TracedStep]) -> None:
        super().__init__()
        self._step_for = step_for
        self.asked: list[Asked] = []

    def step(self, cfg: DictConfig, *, world_size: int, seq_lens: Sequence[int]) -> TracedStep:
        asked = Asked(cfg, world_size, tuple(seq_lens))
        self.asked.append(asked)
        return self._step_for(asked)


def grows_by_one(epoch: int, batch_size: int) -> int:
    return 1


def gives(step: TracedStep) -> FakeTracer:
    return FakeTracer(lambda _: step)


def cfg_of(
    *,
    device: str = "cuda",
    batch_size: int | None = None,
    gradient_accumulation_steps: int = 1,
    use_maximum_batch_size: bool = True,
    batch_increase_function: str | None = None,
    **adaptive: Any,
) -> DictConfig:
    """A config that searches, unless told otherwise."""
    return OmegaConf.create(
        {
            "device": device,
            "batch_size": batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "use_maximum_batch_size": use_maximum_batch_size,
            "batch_increase_function": batch_increase_function,
            "adaptive": adaptive,
        }
    )


def planned(
    cfg: DictConfig,
    step: TracedStep,
    *,
    memory_bytes: int | None = 80 * GIB,
    world_size: int = 1,
    calibration: Calibration | None = None,
    batch_sizes: Sequence[int] = (),
) -> Plan:
    launch = ConfigLaunch(
        title="any",
        cfg=cfg,
        card=Card(name="a card", memory_bytes=memory_bytes, calibration=calibration),
        world_size=world_size,
        seq_lens=tuple(length.seq_len for length in step.peaks),
        batch_sizes=tuple(batch_sizes),
    )
    return launch.plan(gives(step))


def some_plan(**changes: Any) -> Plan:
    """Rows of two lengths on eight ranks; the longer ones do not fit."""
    lengths = [
        peaks(2048, held_bytes=10 * GIB, bytes_per_row=5 * GIB),
        peaks(8192, held_bytes=10 * GIB, bytes_per_row=90 * GIB),
    ]
    return planned(cfg_of(margin=0.05), step_of(*lengths, **changes), world_size=8)


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table's rows, its header first."""
    lines = text.splitlines()
    found: list[list[list[str]]] = []
    for index, line in enumerate(lines):
        if line and set(line) == {"-", " "}:
            end = next(last for last in range(index, len(lines) + 1) if last == len(lines) or not lines[last])
            found.append([re.split(r" {2,}", row.strip()) for row in (lines[index - 1], *lines[index + 1 : end])])
    return found

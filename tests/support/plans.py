"""Plans for tests: a step of known bytes in place of a traced one, and the tables of a text."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.plan.config_plan import ConfigLaunch
from torchtune_adaptive.plan.decide import Plan
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.replay import exact
from torchtune_adaptive.plan.trace.events import BEFORE, Event, Events
from torchtune_adaptive.plan.trace.step_events import StepEvents, TracedStep
from torchtune_adaptive.plan.trace.tracer import Tracer

MIB, GIB = 2**20, 2**30
_MIB_OF_KINDS = {"parameters": 2, "optimizer state": 4}
_PLACES = [  # what is taken, and by its index what is given back
    ("forward", "aten.mm.default", "activations", 3),
    ("forward", "aten.mm.default", "activations", 3),
    ("loss", "aten.nll_loss_forward.default", "activations", 8),
    ("backward", "aten.mm.default", "gradients", 5),
]
# A whole step of 4 rows, with its peak of 20 MiB in the loss.
STEP = exact(
    (
        *(Event(BEFORE, "", kind, MIB * mib) for kind, mib in _MIB_OF_KINDS.items()),
        *(Event(phase, name, kind, MIB * mib) for phase, name, kind, mib in _PLACES[:3]),
        Event("backward", "aten.mm.default", "activations", 0, taken=4),
        Event(*_PLACES[3][:3], MIB * _PLACES[3][3]),
        Event("optimizer", "aten.add_.Tensor", "gradients", 0, taken=6),
    )
)


def rows_of(seq_len: int, *, held_bytes: float, bytes_per_row: float) -> StepEvents:
    """A step of two phases: both hold ``held_bytes`` of parameters, and backward the rows' activations."""

    def step(rows: int) -> tuple[Events]:
        return (
            (
                Event(BEFORE, "", "parameters", round(held_bytes)),
                Event("backward", "mm", "activations", round(bytes_per_row * rows)),
                Event("optimizer", "add", "activations", 0, taken=1),
            ),
        )

    return StepEvents(seq_len, {rows: step(rows) for rows in (1, 2, 3)})


def step_of(*lengths: StepEvents, **changes: Any) -> TracedStep:
    figures: dict[str, Any] = {
        "num_layers": 32,
        "traced_layers": (4, 6),
        "num_parameters": 8_030_000_000,
        "paged_bytes": 0,
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
    batch_sizes: Sequence[int] = (),
) -> Plan:
    launch = ConfigLaunch(
        title="any",
        cfg=cfg,
        card=Card(name="a card", memory_bytes=memory_bytes),
        world_size=world_size,
        seq_lens=tuple(length.seq_len for length in step.lengths),
        batch_sizes=tuple(batch_sizes),
    )
    return launch.plan(gives(step))


def some_plan(**changes: Any) -> Plan:
    """Rows of two lengths on eight ranks; the longer ones do not fit."""
    lengths = [
        rows_of(2048, held_bytes=10 * GIB, bytes_per_row=5 * GIB),
        rows_of(8192, held_bytes=10 * GIB, bytes_per_row=90 * GIB),
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

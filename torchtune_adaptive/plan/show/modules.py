"""Which modules hold the memory at a step's peak."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchtune_adaptive.plan.trace.events import KINDS, StepEvents
from torchtune_adaptive.text import byte_unit, format_bytes, text_table

_SHOWN = 10
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class ModuleBytes:
    """Bytes of the modules whose names differ only in the layer's number, such as ``layers.*.attn``.

    Attributes:
        num_modules: number of modules that hold memory.
        kinds: bytes of each kind, over all these modules.
    """

    module: str
    num_modules: int
    num_bytes: int
    kinds: dict[str, int]


def modules_at_peak(events: StepEvents) -> list[ModuleBytes]:
    """All modules that hold memory at the step's peak, largest first."""
    names: dict[str, set[str]] = defaultdict(set)
    kinds: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
    for one in events.live_after(events.peak_at):
        pattern = _pattern(one.module)
        names[pattern].add(one.module)
        kinds[pattern][one.kind] += one.num_bytes
    found = [
        ModuleBytes(
            pattern, len(names[pattern]), sum(held.values()), {kind: held[kind] for kind in KINDS if held[kind]}
        )
        for pattern, held in kinds.items()
    ]
    return sorted(found, key=lambda one: -one.num_bytes)


def modules_text(events: StepEvents) -> str:
    """A table of the modules that hold the most memory at the step's peak, and where in the step the peak is."""
    found = modules_at_peak(events)
    shown, others = found[:_SHOWN], found[_SHOWN:]
    kinds = [kind for kind in KINDS if any(kind in one.kinds for one in found)]
    unit, unit_bytes = byte_unit(events.peak_bytes)

    def row(module: str, modules: Sequence[ModuleBytes]) -> list[str]:
        held = [sum(one.kinds.get(kind, 0) for one in modules) for kind in kinds]
        number = str(sum(one.num_modules for one in modules))
        return [
            module,
            number,
            *(f"{num_bytes / unit_bytes:.2f}" if num_bytes else "-" for num_bytes in (sum(held), *held)),
        ]

    operation = events.operations[events.peak_at]
    rows = [["module", "modules", "total", *kinds], *(row(one.module, [one]) for one in shown)]
    if others:
        rows.append(row("others", others))
    return "\n".join(
        [
            f"A batch of {events.batch_size} rows of {events.seq_len} tokens has its peak of"
            f" {format_bytes(events.peak_bytes)} in {operation.phase}, at {operation.name} of {operation.module}."
            f" Memory of each module at the peak, in {unit}:",
            text_table([*rows, row("all", found)], num_names=1),
        ]
    )


def step_json(events: StepEvents) -> dict[str, Any]:
    """The step's peak and the modules that hold its memory, as JSON values."""
    operation = events.operations[events.peak_at]
    return {
        "batch_size": events.batch_size,
        "seq_len": events.seq_len,
        "peak_bytes": events.peak_bytes,
        "phase": operation.phase,
        "operation": operation.name,
        "module": operation.module,
        "modules": [asdict(one) for one in modules_at_peak(events)],
    }


def _pattern(module: str) -> str:
    """The name without the numbers of layers.

    >>> _pattern("layers.17.mlp.w1")
    'layers.*.mlp.w1'
    """
    return _NUMBER.sub("*", module)

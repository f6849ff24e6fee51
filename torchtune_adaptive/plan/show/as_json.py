"""A plan as JSON values."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from torchtune_adaptive.plan.decide import Plan, PlannedChange


def plan_json(
    plan: Plan, *, ways: Iterable[PlannedChange] = (), effects: Iterable[PlannedChange] = ()
) -> dict[str, Any]:
    """The plan, with changes that make it fit and the effects of changes.

    Bytes are per rank, except ``host``, which is per machine.
    """
    step, host = plan.step, plan.host
    content = {
        "title": plan.title,
        "assumptions": plan.assumptions,
        "world_size": plan.world_size,
        "memory_bytes": plan.device.memory_bytes,
        "usable_bytes": plan.device.usable_bytes,
        "num_parameters": step.num_parameters,
        "num_frozen_parameters": step.num_frozen_parameters,
        "num_layers": step.num_layers,
        "traced_layers": list(step.traced_layers),
        "paged_bytes": step.paged_bytes,
        "host": None if host is None else asdict(host) | {"peak_bytes": host.peak_bytes},
        "lengths": [asdict(length) for length in plan.lengths],
        "ways_to_fit": [asdict(way) for way in ways],
        "what_if": [asdict(effect) for effect in effects],
    }
    return _in_whole_bytes(content) | {"margin": plan.device.margin, "overhead": asdict(plan.device.overhead)}


def _in_whole_bytes(value: Any) -> Any:
    """The value with every float in it rounded. Only byte counts are floats here."""
    if isinstance(value, dict):
        return {key: _in_whole_bytes(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_in_whole_bytes(one) for one in value]
    return round(value) if isinstance(value, float) else value

"""A plan as JSON."""

import dataclasses
import json

from tests.support.plans import GIB, some_plan
from torchtune_adaptive.plan.decide import LengthPlan, PlannedChange
from torchtune_adaptive.plan.show.as_json import plan_json


def test_the_json_holds_the_whole_plan_and_the_changes_that_make_it_fit() -> None:
    found = some_plan(paged_bytes=7)
    ways = [PlannedChange("2 ranks", found.lengths[0]), PlannedChange("LoRA", None, "`model` is wrong.")]
    content = json.loads(json.dumps(plan_json(found, ways=iter(ways))))
    assert {key: value for key, value in content.items() if not isinstance(value, list | dict)} == {
        "title": "any",
        "assumptions": "",
        "world_size": 8,
        "memory_bytes": 80 * GIB,
        "usable_bytes": round(found.device.usable_bytes),
        "margin": 0.05,
        "num_parameters": 8_030_000_000,
        "num_frozen_parameters": 0,
        "num_layers": 32,
        "paged_bytes": 7,
    }
    assert content["traced_layers"] == [4, 6]
    assert content["overhead"] == json.loads(json.dumps(dataclasses.asdict(found.device.overhead)))
    figures = json.dumps([dataclasses.asdict(length) for length in found.lengths])
    assert content["lengths"] == json.loads(figures, parse_float=lambda num_bytes: round(float(num_bytes)))
    assert isinstance(content["lengths"][0]["used"]["process_bytes"], int)
    assert found.host is not None
    assert content["host"] == dataclasses.asdict(found.host) | {"peak_bytes": found.host.peak_bytes}
    assert set(content["lengths"][0]) == {field.name for field in dataclasses.fields(LengthPlan)}
    assert content["ways_to_fit"] == [
        {"change": "2 ranks", "length": content["lengths"][0], "refused": ""},
        {"change": "LoRA", "length": None, "refused": "`model` is wrong."},
    ]

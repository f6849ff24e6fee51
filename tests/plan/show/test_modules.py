"""Which modules hold the peak, as values, as a table and as JSON."""

import json

from hypothesis import given, settings

from tests.support.plans import tables
from tests.support.step_events import EVENTS, MIB, drawn_events
from torchtune_adaptive.plan.show.modules import modules_at_peak, modules_text, step_json
from torchtune_adaptive.plan.trace.events import BEFORE_STEP, Allocation, Operation, StepEvents


def test_layers_are_one_line_with_their_number_and_the_bytes_of_each_kind() -> None:
    layers, loss = modules_at_peak(EVENTS)
    assert (layers.module, layers.num_modules, layers.num_bytes) == ("layers.*.mlp.w1", 2, 12 * MIB)
    assert layers.kinds == {"parameters": 2 * MIB, "optimizer state": 4 * MIB, "activations": 6 * MIB}
    assert (loss.module, loss.num_modules, loss.kinds) == ("loss", 1, {"activations": 8 * MIB})


@settings(max_examples=60)
@given(drawn_events())
def test_all_modules_together_hold_the_peak_and_the_largest_come_first(events: StepEvents) -> None:
    found = modules_at_peak(events)
    assert sum(one.num_bytes for one in found) == events.peak_bytes
    assert all(sum(one.kinds.values()) == one.num_bytes and 0 not in one.kinds.values() for one in found)
    assert [one.num_bytes for one in found] == sorted((one.num_bytes for one in found), reverse=True)


def test_the_text_says_where_the_peak_is_and_what_each_module_holds() -> None:
    text = modules_text(EVENTS)
    assert text.startswith(
        "A batch of 4 rows of 256 tokens has its peak of 20.0 MiB in loss, at aten.nll_loss_forward.default of"
        " loss. Memory of each module at the peak, in MiB:\n"
    )
    assert tables(text)[0] == [
        ["module", "modules", "total", "parameters", "optimizer state", "activations"],
        ["layers.*.mlp.w1", "2", "12.00", "2.00", "4.00", "6.00"],
        ["loss", "1", "8.00", "-", "-", "8.00"],
        ["all", "3", "20.00", "2.00", "4.00", "14.00"],
    ]


def test_of_many_modules_ten_are_shown_and_the_others_are_one_line() -> None:
    held = tuple(Allocation((20 - n) * MIB, "parameters", f"part{n}", BEFORE_STEP, None) for n in range(12))
    rows = tables(modules_text(StepEvents(1, 8, (Operation("mm", "forward", "part0"),), held)))[0]
    assert [row[0] for row in rows] == ["module", *(f"part{n}" for n in range(10)), "others", "all"]
    assert rows[-2][1:] == ["2", "19.00", "19.00"]


def test_the_json_holds_the_peak_and_all_modules() -> None:
    step = json.loads(json.dumps(step_json(EVENTS)))
    assert (step["batch_size"], step["seq_len"], step["peak_bytes"]) == (4, 256, 20 * MIB)
    assert (step["phase"], step["operation"], step["module"]) == ("loss", "aten.nll_loss_forward.default", "loss")
    kinds = {"activations": 8 * MIB}
    assert step["modules"][1] == {"module": "loss", "num_modules": 1, "num_bytes": 8 * MIB, "kinds": kinds}

"""What DDP takes at its start: buffers that the allocator keeps, and buckets that are made twice."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.plans import MIB
from torchtune_adaptive.plan.hugging_face.replicas import not_replicated, setup_of_replicas
from torchtune_adaptive.plan.replay import replayed
from torchtune_adaptive.plan.trace.events import BEFORE, REBUILT, Event, Events, with_setup


def weights(*mib: float) -> nn.ParameterList:
    tensors = (torch.empty(round(one * MIB / 4), device="meta") for one in mib)
    return nn.ParameterList(nn.Parameter(one) for one in tensors)


def mib_of(events: Events, name: str) -> list[float]:
    """What events of that name take, and as negative numbers what they give back."""
    named = (event for event in events if event.operation == name)
    return [-events[one.taken].num_bytes / MIB if one.taken >= 0 else one.num_bytes / MIB for one in named]


def test_weights_are_sent_in_buffers_of_250_mib_two_at_a_time_and_a_large_one_without() -> None:
    sent = mib_of(setup_of_replicas(weights(200, 100, 300, 60, 30), {}), "sent")
    assert [one for one in sent if one] == [300, -300, 90, -90]
    sent = mib_of(setup_of_replicas(weights(200, 100, 150, 120, 60, 30), {}), "sent")
    assert [one for one in sent if one] == [300, 270, -300, 90, -270, -90]


@pytest.mark.parametrize(
    ("options", "first", "later"),
    [
        ({}, [71], [-71, 1, 30, 40]),  # gradients come from the last weight to the first
        ({"find_unused_parameters": True}, [1, 30, 40], []),
        ({"bucket_cap_mb": 100}, [71], [-71, 71]),
    ],
)
def test_gradients_have_one_bucket_until_their_order_is_known(
    options: dict[str, Any], first: list[float], later: list[float]
) -> None:
    setup = setup_of_replicas(weights(40, 30, 1), options)
    assert (mib_of(setup, "bucket"), mib_of(setup, REBUILT)) == (first, later)


def test_a_process_keeps_the_memory_of_buffers_and_makes_buckets_again_after_its_first_step() -> None:
    step = (
        Event(BEFORE, "", "parameters", 100 * MIB),
        Event(BEFORE, "", "optimizer state", 10 * MIB),
        Event("forward", "mm", "activations", 200 * MIB),
        Event("backward", "mm", "activations", 0, taken=2),
        Event("optimizer", "mm", "optimizer state", 0, taken=1),
        Event("optimizer", "mm", "optimizer state", 10 * MIB),
    )
    setup = setup_of_replicas(weights(60, 40), {})
    whole = with_setup(step, setup)
    assert [event for event in whole if event.phase != BEFORE][1].taken == 2 + len(setup)
    memory = replayed(whole)
    assert memory.allocated_bytes == (100 + 100 + 10 + 200) * MIB  # buffers are gone
    assert memory.kinds()["other tensors"] == 100 * MIB
    # The buffer of 100 MiB has the single bucket, whose place the two later ones take.
    assert memory.reserved_bytes == (100 + 100 + 10 + 200) * MIB
    assert replayed(with_setup(step, setup[:-3])).reserved_bytes == memory.reserved_bytes


def test_a_model_is_not_wrapped_and_the_options_are_known() -> None:
    model, wrapper = nn.Linear(1, 1), nn.parallel.DistributedDataParallel
    with not_replicated() as options:
        assert nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) is model
    assert options == {"find_unused_parameters": True}
    assert nn.parallel.DistributedDataParallel is wrapper

"""Batch sizes of a synthetic step against the memory of a device."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from tests.support.plans import GIB, MIB, cfg_of, planned, rows_of, step_of, tables
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan import decide
from torchtune_adaptive.plan.decide import Plan
from torchtune_adaptive.plan.gpu import Overhead
from torchtune_adaptive.plan.replay import replayed
from torchtune_adaptive.plan.show.as_json import plan_json
from torchtune_adaptive.plan.show.text import plan_text
from torchtune_adaptive.plan.trace.events import Event
from torchtune_adaptive.plan.trace.step_events import StepEvents, TracedStep

properties = settings(max_examples=25)


class Case(NamedTuple):
    """A drawn step and card."""

    seq_len: int
    held_bytes: int
    bytes_per_row: int
    memory_bytes: int
    memory_limit: int | None
    margin: float
    world_size: int

    @property
    def step(self) -> TracedStep:
        return step_of(rows_of(self.seq_len, held_bytes=self.held_bytes, bytes_per_row=self.bytes_per_row))

    def cfg(self, **more: Any) -> DictConfig:
        return cfg_of(memory_limit=self.memory_limit, margin=self.margin, **more)

    def plan(self, *, batch_sizes: Sequence[int] = ()) -> Plan:
        return planned(
            self.cfg(), self.step, memory_bytes=self.memory_bytes, world_size=self.world_size, batch_sizes=batch_sizes
        )

    def peak_bytes(self, batch_size: int) -> int:
        return self.held_bytes + self.bytes_per_row * batch_size

    def reserved_bytes(self, batch_size: int, overhead: Overhead) -> int:
        """What the allocator reserves: nothing is given back before the largest tensor."""
        step = self.step.lengths[0].at(batch_size)
        return replayed(step, workspaces=overhead.workspaces).reserved_bytes

    def reservable_bytes(self, outside_bytes: float) -> float:
        """What the card leaves for it, without the margin."""
        left = max(0, self.memory_bytes - outside_bytes)
        return min(left, left if self.memory_limit is None else self.memory_limit) * (1 - self.margin)


cases = st.builds(
    Case,
    seq_len=st.integers(1, 8192),
    held_bytes=st.integers(0, 90 * GIB),
    bytes_per_row=st.integers(MIB, 4 * GIB),
    memory_bytes=st.integers(GIB, 200 * GIB),
    memory_limit=st.none() | st.integers(GIB, 200 * GIB),
    margin=st.sampled_from([0.0, 0.05, 0.5]),
    world_size=st.sampled_from([1, 8]),
)


@properties
@given(cases)
def test_the_largest_size_fits_the_card_and_the_next_one_does_not(case: Case) -> None:
    found = case.plan()
    overhead, (length,) = found.device.overhead, found.lengths
    exact, safe = length.largest_batch_size, length.safe_batch_size
    assert exact is not None
    assert safe is not None
    assert safe <= exact
    middle = (overhead.least_outside_bytes + overhead.most_outside_bytes) / 2
    room = case.reservable_bytes(middle)
    assert exact == 0 or case.reserved_bytes(exact, overhead) <= room < case.reserved_bytes(exact + 1, overhead)
    room = case.reservable_bytes(overhead.most_outside_bytes) / (1 + overhead.uncertainty)
    assert safe == 0 or case.reserved_bytes(safe, overhead) <= room < case.reserved_bytes(safe + 1, overhead)


@properties
@given(cases)
def test_the_figures_of_a_plan_are_those_of_the_size_used(case: Case) -> None:
    found = case.plan()
    used, overhead = found.lengths[0].used, found.device.overhead
    assert max(used.phases.values()) == sum(used.kinds.values()) == used.allocated_bytes
    assert 0 <= used.allocated_bytes - case.peak_bytes(used.batch_size) - sum(overhead.workspaces) < 3 * MIB
    assert used.reserved_bytes == case.reserved_bytes(used.batch_size, overhead)
    middle = (overhead.least_outside_bytes + overhead.most_outside_bytes) / 2
    assert used.process_bytes == used.reserved_bytes + middle
    spread = overhead.most_outside_bytes - middle
    assert used.uncertainty_bytes == spread + overhead.uncertainty * used.reserved_bytes


@properties
@given(cases, st.integers(1, 8))
def test_a_size_fits_if_it_does_even_in_the_worst_case_and_does_not_if_even_the_best_is_too_much(
    case: Case, batch_size: int
) -> None:
    (length,) = case.plan(batch_sizes=[batch_size]).lengths
    (size,) = length.asked
    without_margin = case._replace(margin=0)
    overhead = case.plan().device.overhead
    reserved_bytes = case.reserved_bytes(batch_size, overhead)
    worst = reserved_bytes * (1 + overhead.uncertainty)
    assert (size.fits == "fits") == (worst <= without_margin.reservable_bytes(overhead.most_outside_bytes))
    best = without_margin.reservable_bytes(overhead.least_outside_bytes) * (1 + overhead.uncertainty)
    assert (size.fits == "does not fit") == (reserved_bytes > best)


def test_a_step_for_which_the_allocator_must_empty_its_cache_may_fit() -> None:
    """It takes 30 GiB, gives them back and takes 40 GiB: 70 GiB reserved, or 40 with an empty cache between."""
    events = (
        Event("forward", "mm", "activations", 30 * GIB),
        Event("forward", "mm", "activations", 0, taken=0),
        Event("backward", "mm", "activations", 40 * GIB),
        Event("backward", "mm", "activations", 0, taken=2),
    )
    step = step_of(StepEvents(512, dict.fromkeys((1, 2, 3), (events,))))
    fits = {
        memory: planned(cfg_of(), step, memory_bytes=memory * GIB, batch_sizes=[1]).lengths[0].asked[0].fits
        for memory in (40, 45, 60, 80)
    }
    assert fits == {40: "does not fit", 45: "may fit", 60: "may fit", 80: "fits"}
    assert planned(cfg_of(), step, memory_bytes=60 * GIB).lengths[0].largest_batch_size == 0  # not for a search


@properties
@given(
    st.integers(0, 5000),
    st.integers(1, 300),
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.sampled_from([0.0, 0.25]),
)
def test_on_a_cpu_nothing_is_added(held: int, per_row: int, memory: int, limit: int, margin: float) -> None:
    step = step_of(rows_of(100, held_bytes=2 * held, bytes_per_row=per_row))
    cfg = cfg_of(device="cpu", margin=margin, memory_limit=limit)
    length = planned(cfg, step, memory_bytes=memory).lengths[0]
    fitting = max(0, int((min(memory, limit) * (1 - margin) - 2 * held) // per_row))
    assert length.largest_batch_size == length.safe_batch_size == fitting
    used = length.used
    assert {used.allocated_bytes, used.reserved_bytes, used.process_bytes} == {2 * held + used.batch_size * per_row}
    assert used.uncertainty_bytes == 0


def test_memory_that_does_not_grow_bounds_nothing() -> None:
    found = planned(cfg_of(device="cpu"), step_of(rows_of(128, held_bytes=GIB, bytes_per_row=0)))
    assert (found.lengths[0].largest_batch_size, found.lengths[0].safe_batch_size) == (None, None)
    assert tables(plan_text(found))[0][1][1:3] == ["any", "any"]
    content = json.loads(json.dumps(plan_json(found)))
    assert content["lengths"][0]["largest_batch_size"] is None
    assert content["ways_to_fit"] == []


def test_a_plan_fits_if_the_longest_rows_do() -> None:
    short, long = (rows_of(seq_len, held_bytes=GIB, bytes_per_row=seq_len * 10 * MIB) for seq_len in (2048, 8192))
    found = planned(cfg_of(), step_of(short, long))
    assert [length.largest_batch_size != 0 for length in found.lengths] == [True, False]
    assert not found.fits
    assert found.decisive == found.lengths[1]
    assert found.decisive.used.batch_size == 1
    assert found.size(2).kinds["activations"] == 160 * GIB
    assert planned(cfg_of(), step_of(short)).fits


def test_a_size_is_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(cfg_of(), step_of(rows_of(2048, held_bytes=GIB, bytes_per_row=GIB)))
    replays: list[int] = []
    monkeypatch.setattr(decide, "replayed", lambda *args, **options: replays.append(1) or replayed(*args, **options))
    assert found.size(1) == found.size(1)
    assert len(replays) == 1


# ---- overhead


def test_expandable_segments_reserve_less(monkeypatch: pytest.MonkeyPatch) -> None:
    events = tuple(Event("forward", "mm", "activations", size * GIB) for size in (30, 40))
    given_back = tuple(Event("backward", "mm", "activations", 0, taken=place) for place in (0, 1))
    step = step_of(StepEvents(512, dict.fromkeys((1, 2, 3), ((events[0], given_back[0], events[1]),))))
    plain = planned(cfg_of(), step).size(2).reserved_bytes
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert planned(cfg_of(), step).size(2).reserved_bytes < plain - 25 * GIB


def test_a_memory_limit_alone_allows_what_it_allows_on_a_larger_card() -> None:
    step = step_of(rows_of(512, held_bytes=30 * GIB, bytes_per_row=GIB))
    cfg = cfg_of(memory_limit="40GiB", margin=0)
    alone, on_card = (planned(cfg, step, memory_bytes=memory, batch_sizes=[7, 30]) for memory in (None, 80 * GIB))
    assert alone.lengths == on_card.lengths
    assert alone.device.limit_bytes == 40 * GIB + alone.device.outside_bytes


def test_the_ranks_of_a_tensor_parallel_group_share_their_samples() -> None:
    blocks = {name: {"_component_": f"some.{name}"} for name in ("model", "optimizer", "loss")}
    usual = cfg_of(batch_size=2, use_maximum_batch_size=False)
    cfg = DictConfig(usual | blocks | {"tensor_parallel_dim": 4})
    step = step_of(rows_of(512, held_bytes=GIB, bytes_per_row=100 * MIB), sequences=2)  # a row is a pair
    assert planned(cfg, step, world_size=8).lengths[0].tokens_per_step == 2 * 2 * 2 * 512
    with pytest.raises(InputError, match=r"`tensor_parallel_dim` must divide the number of ranks \(6\), but is 4"):
        planned(cfg, step, world_size=6)

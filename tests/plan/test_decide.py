"""Batch sizes of a synthetic step against the memory of a device."""

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from tests.support.plans import ATTENTION_WIDTH, GIB, MIB, cfg_of, peaks, planned, step_of, tables
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.decide import Plan
from torchtune_adaptive.plan.gpu import EXPANDABLE_FRAGMENTATION, FRAGMENTATION, Overhead
from torchtune_adaptive.plan.show.as_json import plan_json
from torchtune_adaptive.plan.show.text import plan_text
from torchtune_adaptive.plan.trace.peaks import TracedStep

properties = settings(max_examples=60)


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
        return step_of(peaks(self.seq_len, held_bytes=self.held_bytes, bytes_per_row=self.bytes_per_row))

    def cfg(self, **more: Any) -> DictConfig:
        return cfg_of(memory_limit=self.memory_limit, margin=self.margin, **more)

    def plan(self, **more: Any) -> Plan:
        return planned(self.cfg(**more), self.step, memory_bytes=self.memory_bytes, world_size=self.world_size)

    def peak_bytes(self, batch_size: int) -> int:
        return self.held_bytes + self.bytes_per_row * batch_size

    def excess_bytes(self, batch_size: int, *, certain: bool) -> float:
        """By how much a batch exceeds what the card allows."""
        overhead = Overhead.default(self.world_size, attention_width=ATTENTION_WIDTH)
        outside = overhead.outside_bytes
        limit = self.memory_bytes if self.memory_limit is None else min(self.memory_bytes, self.memory_limit + outside)
        tokens = batch_size * 128 * -(-self.seq_len // 128)
        phases = {"backward": self.peak_bytes(batch_size), "optimizer": self.held_bytes}
        reserved = overhead.reserved_bytes(overhead.allocated_bytes(phases, num_tokens=tokens))
        uncertainty = overhead.uncertainty_bytes_at(reserved) if certain else 0
        return reserved + uncertainty - (limit - outside) * (1 - self.margin)


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
    length = case.plan().lengths[0]
    exact, safe = length.largest_batch_size, length.safe_batch_size
    assert exact is not None
    assert safe is not None
    assert safe <= exact
    for size, certain in ((exact, False), (safe, True)):
        rounding = 1e-9 * 200 * GIB
        assert size == 0 or case.excess_bytes(size, certain=certain) <= rounding
        assert case.excess_bytes(size + 1, certain=certain) > -rounding


@properties
@given(cases)
def test_the_figures_of_a_plan_are_those_of_the_size_used(case: Case) -> None:
    found = case.plan()
    used, overhead = found.lengths[0].used, found.device.overhead
    assert used.peak_bytes == case.peak_bytes(used.batch_size)
    assert used.phases == {"backward": used.peak_bytes, "optimizer": case.held_bytes}
    assert sum(used.kinds.values()) == used.peak_bytes
    tokens = used.batch_size * 128 * -(-case.seq_len // 128)
    assert used.allocated_bytes == overhead.allocated_bytes(used.phases, num_tokens=tokens)
    assert used.reserved_bytes == overhead.reserved_bytes(used.allocated_bytes)
    assert used.process_bytes == used.reserved_bytes + overhead.outside_bytes
    assert used.uncertainty_bytes == overhead.uncertainty_bytes_at(used.reserved_bytes)


@properties
@given(cases)
def test_a_safe_batch_is_one_whose_figures_in_the_table_add_up_to_no_more_than_it_may_use(case: Case) -> None:
    found = case.plan()
    for batch_size in range(1, 9):
        size = found.size(batch_size)
        usable = found.device.usable_bytes
        assert (size.fits == "yes") == (size.process_bytes + size.uncertainty_bytes <= usable)
        assert (size.fits == "no") == (size.process_bytes > usable)


@properties
@given(
    st.integers(0, 5000),
    st.integers(1, 300),
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.sampled_from([0.0, 0.25]),
)
def test_on_a_cpu_nothing_is_added(held: int, per_row: int, memory: int, limit: int, margin: float) -> None:
    step = step_of(peaks(100, held_bytes=2 * held, bytes_per_row=per_row))
    cfg = cfg_of(device="cpu", margin=margin, memory_limit=limit)
    length = planned(cfg, step, memory_bytes=memory).lengths[0]
    fitting = max(0, int((min(memory, limit) * (1 - margin) - 2 * held) // per_row))
    assert length.largest_batch_size == length.safe_batch_size == fitting
    used = length.used
    assert {used.allocated_bytes, used.reserved_bytes, used.process_bytes} == {used.peak_bytes}
    assert used.uncertainty_bytes == 0


def test_each_size_that_is_asked_for_has_its_own_figures_and_whether_it_fits() -> None:
    step = step_of(peaks(512, held_bytes=10 * GIB, bytes_per_row=GIB))
    (largest,) = planned(cfg_of(), step).lengths
    exact, certain = largest.largest_batch_size, largest.safe_batch_size
    assert exact is not None
    assert certain is not None
    assert certain < exact
    sizes = [1, certain, exact, exact + 1]
    (length,) = planned(cfg_of(), step, batch_sizes=sizes).lengths
    fits = ["yes", "yes", "perhaps", "no"]
    assert [(one.batch_size, one.fits) for one in length.asked] == list(zip(sizes, fits, strict=True))
    assert [one.peak_bytes for one in length.asked] == [(10 + size) * GIB for size in sizes]
    assert planned(cfg_of(), step, batch_sizes=[length.used.batch_size]).lengths[0].asked == (length.used,)
    assert length.shown == length.asked
    assert largest.shown == (largest.used,)


def test_memory_that_does_not_grow_bounds_nothing() -> None:
    found = planned(cfg_of(device="cpu"), step_of(peaks(128, held_bytes=GIB, bytes_per_row=0)))
    assert (found.lengths[0].largest_batch_size, found.lengths[0].safe_batch_size) == (None, None)
    assert tables(plan_text(found))[0][1][1:3] == ["any", "any"]
    content = json.loads(json.dumps(plan_json(found)))
    assert content["lengths"][0]["largest_batch_size"] is None
    assert content["ways_to_fit"] == []


def test_a_plan_fits_if_the_longest_rows_do() -> None:
    short, long = (peaks(seq_len, held_bytes=GIB, bytes_per_row=seq_len * 10 * MIB) for seq_len in (2048, 8192))
    found = planned(cfg_of(), step_of(short, long))
    assert [length.largest_batch_size != 0 for length in found.lengths] == [True, False]
    assert not found.fits
    assert found.decisive == found.lengths[1]
    assert (found.decisive.used.batch_size, found.decisive.used.peak_bytes) == (1, 81 * GIB)
    assert found.size(2).peak_bytes == 161 * GIB
    assert planned(cfg_of(), step_of(short)).fits


def test_a_row_that_is_a_pair_has_the_tokens_and_the_scratch_memory_of_two_sequences() -> None:
    one, two = (
        planned(cfg_of(), step_of(peaks(512, held_bytes=GIB, bytes_per_row=100 * MIB), sequences=sequences)).lengths[0]
        for sequences in (1, 2)
    )
    assert two.tokens_per_step == 2 * two.used.batch_size * 512
    assert one.used.batch_size == two.used.batch_size
    assert one.largest_batch_size is not None
    assert two.largest_batch_size is not None
    assert two.largest_batch_size < one.largest_batch_size
    assert two.used.allocated_bytes > one.used.allocated_bytes


# ---- overhead


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_fragment_less(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(peaks(2048, held_bytes=10 * GIB, bytes_per_row=GIB))
    assert planned(cfg_of(), step).device.overhead.fragmentation == FRAGMENTATION
    monkeypatch.setenv(variable, "expandable_segments:True")
    assert planned(cfg_of(), step).device.overhead.fragmentation == EXPANDABLE_FRAGMENTATION


@pytest.mark.parametrize("batch_size", [1, 2, 7, 30])
def test_a_memory_limit_alone_allows_what_it_allows_on_a_larger_card(batch_size: int) -> None:
    step = step_of(peaks(512, held_bytes=30 * GIB, bytes_per_row=GIB))
    cfg = cfg_of(memory_limit="40GiB", margin=0)
    alone, on_card = (planned(cfg, step, memory_bytes=memory, batch_sizes=[batch_size]) for memory in (None, 80 * GIB))
    assert alone.lengths == on_card.lengths
    assert alone.device.limit_bytes == 40 * GIB + alone.device.overhead.outside_bytes


def test_the_ranks_of_a_tensor_parallel_group_share_their_samples() -> None:
    blocks = {name: {"_component_": f"some.{name}"} for name in ("model", "optimizer", "loss")}
    cfg = OmegaConf.merge(cfg_of(batch_size=2, use_maximum_batch_size=False), blocks, {"tensor_parallel_dim": 4})
    assert isinstance(cfg, DictConfig)
    step = step_of(peaks(512, held_bytes=GIB, bytes_per_row=100 * MIB))
    assert planned(cfg, step, world_size=8).lengths[0].tokens_per_step == 2 * 2 * 512
    with pytest.raises(InputError, match=r"`tensor_parallel_dim` must divide the number of ranks \(6\), but is 4"):
        planned(cfg, step, world_size=6)

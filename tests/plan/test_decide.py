"""Plans of a synthetic step: sizes against the card's memory, suggestions, and the plan as text and JSON."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from tests.support.plans import (
    ATTENTION_WIDTH,
    GIB,
    MIB,
    Asked,
    FakeTracer,
    cfg_of,
    gives,
    peaks,
    planned,
    step_of,
    tables,
)
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.decide import Card, LengthPlan, Plan, SizePlan, plan
from torchtune_adaptive.plan.gpu import EXPANDABLE_FRAGMENTATION, FRAGMENTATION, Overhead
from torchtune_adaptive.plan.host import CUDA_PROCESS_BYTES, PROCESS_BYTES, HostFigures, pinned_bytes
from torchtune_adaptive.plan.show.text import plan_json, plan_text, suggestion_text
from torchtune_adaptive.plan.suggestions import Suggestion, suggestions
from torchtune_adaptive.plan.trace.peaks import TracedStep

properties = settings(derandomize=True, deadline=None, max_examples=60)


@pytest.fixture(autouse=True)
def usual_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the allocator settings of the machine that runs the tests."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


# ---- sizes


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
        peak = self.peak_bytes(batch_size)
        traced = peak + (overhead.uncertainty_bytes_at(peak) if certain else 0)
        tokens = batch_size * 128 * -(-self.seq_len // 128)
        return overhead.reserved_bytes(traced, num_tokens=tokens) - (limit - outside) * (1 - self.margin)


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
    exact, safe = length.exact_batch_size, length.certain_batch_size
    assert exact is not None
    assert safe is not None
    assert safe <= exact
    for size, certain in ((exact, False), (safe, True)):
        rounding = 1e-9 * 200 * GIB
        assert size == 0 or case.excess_bytes(size, certain=certain) <= rounding
        assert case.excess_bytes(size + 1, certain=certain) > -rounding


@properties
@given(cases, st.booleans(), st.none() | st.integers(1, 300))
def test_the_size_used_is_within_the_exact_one_the_bound_and_a_power_of_two_if_wanted(
    case: Case, power_of_two: bool, max_batch_size: int | None
) -> None:
    length = case.plan(power_of_two=power_of_two, max_batch_size=max_batch_size).lengths[0]
    used, exact = length.batch_size, length.exact_batch_size
    assert exact is not None
    most = max(1, min(exact, max_batch_size or exact))
    assert used in {2**exponent for exponent in range(20)} if power_of_two else used == most
    assert used <= most < 2 * used
    assert exact == case.plan().lengths[0].exact_batch_size  # which does not depend on these settings


@properties
@given(cases)
def test_the_figures_of_a_plan_are_those_of_the_size_used(case: Case) -> None:
    found = case.plan()
    length = found.lengths[0]
    assert length.peak_bytes == case.peak_bytes(length.batch_size)
    assert length.phases == {"backward": length.peak_bytes, "optimizer": case.held_bytes}
    assert sum(length.kinds.values()) == length.peak_bytes
    tokens = length.batch_size * 128 * -(-case.seq_len // 128)
    assert length.allocated_bytes == found.overhead.allocated_bytes(length.peak_bytes, num_tokens=tokens)
    assert length.reserved_bytes == found.overhead.reserved_bytes(length.peak_bytes, num_tokens=tokens)
    assert length.process_bytes == length.reserved_bytes + found.overhead.outside_bytes
    assert length.uncertainty_bytes == found.overhead.uncertainty_bytes_at(length.peak_bytes)


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
    assert length.exact_batch_size == length.certain_batch_size == fitting
    assert {length.allocated_bytes, length.reserved_bytes, length.process_bytes} == {length.peak_bytes}
    assert length.uncertainty_bytes == 0


def test_each_size_that_is_asked_for_has_its_own_figures_and_whether_it_fits() -> None:
    step = step_of(peaks(512, held_bytes=10 * GIB, bytes_per_row=GIB))
    (largest,) = planned(cfg_of(), step).lengths
    exact, certain = largest.exact_batch_size, largest.certain_batch_size
    assert exact is not None
    assert certain is not None
    assert certain < exact
    sizes = [1, certain, exact, exact + 1]
    (length,) = planned(cfg_of(), step, batch_sizes=sizes).lengths
    fits = ["yes", "yes", "perhaps", "no"]
    assert [(one.batch_size, one.fits) for one in length.asked] == list(zip(sizes, fits, strict=True))
    assert [one.peak_bytes for one in length.asked] == [(10 + size) * GIB for size in sizes]
    assert [one.tokens_per_step for one in length.asked] == [512 * size for size in sizes]
    (of_used,) = planned(cfg_of(), step, batch_sizes=[length.batch_size]).lengths[0].asked
    assert all(getattr(of_used, field.name) == getattr(length, field.name) for field in dataclasses.fields(of_used))


def test_memory_that_does_not_grow_bounds_nothing() -> None:
    found = planned(cfg_of(device="cpu"), step_of(peaks(128, held_bytes=GIB, bytes_per_row=0)))
    assert (found.lengths[0].exact_batch_size, found.lengths[0].certain_batch_size) == (None, None)
    assert tables(plan_text(found, title="any"))[0][1][1:3] == ["any", "any"]
    content = json.loads(json.dumps(plan_json(found, [])))
    assert content["lengths"][0]["exact_batch_size"] is None
    assert content["suggestions"] == []


def test_a_plan_fits_if_rows_of_any_length_do_and_else_has_the_figures_of_one_row() -> None:
    short, long = (peaks(seq_len, held_bytes=GIB, bytes_per_row=seq_len * 10 * MIB) for seq_len in (2048, 8192))
    found = planned(cfg_of(), step_of(short, long))
    assert [length.exact_batch_size != 0 for length in found.lengths] == [True, False]
    assert found.fits
    (length,) = planned(cfg_of(), step_of(long)).lengths
    assert not planned(cfg_of(), step_of(long)).fits
    assert (length.exact_batch_size, length.batch_size, length.peak_bytes) == (0, 1, 81 * GIB)


def test_a_step_has_the_tokens_of_all_ranks_and_micro_steps() -> None:
    step = step_of(*(peaks(seq_len, held_bytes=GIB, bytes_per_row=seq_len * MIB) for seq_len in (500, 1024)))
    found = planned(cfg_of(gradient_accumulation_steps=3), step, world_size=8)
    assert [length.tokens_per_step for length in found.lengths] == [
        length.batch_size * length.seq_len * 8 * 3 for length in found.lengths
    ]
    assert found.lengths[0].batch_size > 1


def test_a_row_that_is_a_pair_has_the_tokens_and_the_scratch_memory_of_two_sequences() -> None:
    one, two = (
        planned(cfg_of(), step_of(peaks(512, held_bytes=GIB, bytes_per_row=100 * MIB), sequences=sequences)).lengths[0]
        for sequences in (1, 2)
    )
    assert two.tokens_per_step == 2 * two.batch_size * 512
    assert one.batch_size == two.batch_size
    assert one.exact_batch_size is not None
    assert two.exact_batch_size is not None
    assert two.exact_batch_size < one.exact_batch_size
    assert two.allocated_bytes > one.allocated_bytes


@pytest.mark.parametrize(("global_batch_size", "batch_size"), [(8, 1), (20, 3), (200, 10)])
def test_a_global_batch_size_bounds_the_rows_of_a_rank_and_gives_the_tokens_of_a_step(
    global_batch_size: int, batch_size: int
) -> None:
    step = step_of(peaks(512, held_bytes=100, bytes_per_row=10))
    cfg = cfg_of(device="cpu", margin=0, power_of_two=False, global_batch_size=global_batch_size)
    length = planned(cfg, step, memory_bytes=200, world_size=8).lengths[0]
    assert (length.exact_batch_size, length.batch_size) == (10, batch_size)
    assert length.tokens_per_step == global_batch_size * 512


# ---- what is traced


@pytest.mark.parametrize(
    "adaptive",
    [{"global_batch_size": 8}, {"max_tokens_per_micro_batch": 64}, {"growth_limit": 16}],
    ids=lambda adaptive: next(iter(adaptive)),
)
def test_two_micro_steps_are_traced_where_training_may_take_any_number(adaptive: dict[str, Any]) -> None:
    tracer = gives(step_of(peaks(512, held_bytes=GIB, bytes_per_row=GIB)))
    cfg = cfg_of(**adaptive)
    plan(cfg, world_size=8, card=Card(memory_bytes=80 * GIB), seq_lens=[512], traced_by=tracer)
    assert tracer.asked == [Asked(cfg_of(gradient_accumulation_steps=2, **adaptive), 8, (512,))]
    assert cfg.gradient_accumulation_steps == 1


def test_the_config_is_traced_as_it_is_where_it_gives_the_number_of_micro_steps() -> None:
    tracer = gives(step_of(peaks(512, held_bytes=GIB, bytes_per_row=GIB)))
    cfg = cfg_of(gradient_accumulation_steps=5)
    plan(cfg, world_size=8, card=Card(memory_bytes=80 * GIB), seq_lens=[512, 1024], traced_by=tracer)
    assert tracer.asked == [Asked(cfg, 8, (512, 1024))]


def test_fewer_samples_per_step_than_ranks_are_refused_before_anything_is_traced() -> None:
    tracer = gives(step_of(peaks(512, held_bytes=GIB, bytes_per_row=GIB)))
    with pytest.raises(InputError, match=r"at least the number of ranks \(8\), but is 7 instead\.$"):
        plan(cfg_of(global_batch_size=7), world_size=8, card=Card(memory_bytes=GIB), seq_lens=[512], traced_by=tracer)
    assert tracer.asked == []


# ---- overhead


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_fragment_less(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(peaks(2048, held_bytes=10 * GIB, bytes_per_row=GIB))
    assert planned(cfg_of(), step).overhead.fragmentation == FRAGMENTATION
    monkeypatch.setenv(variable, "expandable_segments:True")
    assert planned(cfg_of(), step).overhead.fragmentation == EXPANDABLE_FRAGMENTATION


# ---- suggestions


FULL_CFG = {
    "device": "cuda",
    "optimizer_in_bwd": True,
    "model": {"_component_": "torchtune.models.llama2.llama2", "num_layers": 32, "embed_dim": 4096},
    "enable_activation_checkpointing": False,
    "ac_mode": "selective",
}
LORA_MODEL = {"_component_": "torchtune.models.llama2.lora_llama2", "lora_attn_modules": ["q_proj"], "lora_rank": 4}


def full_cfg(**changes: Any) -> DictConfig:
    return OmegaConf.create(FULL_CFG | changes)


def lora_cfg(**changes: Any) -> DictConfig:
    return full_cfg(model=LORA_MODEL, **changes)


def as_a_model_would(asked: Asked) -> TracedStep:
    """A model's usual memory: state is sharded and small with LoRA, and rows are cheaper with checkpointing."""
    trained = 2 * GIB if "lora_attn_modules" in asked.cfg.model else 100 * GIB
    checkpointed = asked.cfg.get("enable_activation_checkpointing", False)
    bytes_per_token = MIB if checkpointed else 8 * MIB
    return step_of(
        *(
            peaks(seq_len, held_bytes=(trained + 14 * GIB) / asked.world_size, bytes_per_row=seq_len * bytes_per_token)
            for seq_len in asked.seq_lens
        )
    )


class Helped(NamedTuple):
    """What was suggested, and what the tracer was asked."""

    found: list[Suggestion]
    asked: list[Asked]

    @property
    def changes(self) -> list[str]:
        return [suggestion.change for suggestion in self.found]


def helped(
    cfg: DictConfig,
    step_for: Callable[[Asked], TracedStep] = as_a_model_would,
    *,
    world_size: int = 1,
    seq_len: int = 4096,
    memory_bytes: int = 80 * GIB,
) -> Helped:
    tracer = FakeTracer(step_for)
    card = Card(memory_bytes=memory_bytes)
    found = suggestions(cfg, world_size=world_size, card=card, seq_len=seq_len, traced_by=tracer)
    return Helped(list(found), tracer.asked)


def ranks_asked(result: Helped) -> list[int]:
    return [asked.world_size for asked in result.asked if asked.world_size > 1]


def test_every_suggestion_is_planned_with_the_change_that_it_names() -> None:
    as_it_is = full_cfg()
    result = helped(as_it_is)
    assert as_it_is == full_cfg()
    checkpointed = full_cfg(enable_activation_checkpointing=True, ac_mode=None)
    lora = result.asked[1].cfg
    assert result.changes == [
        "enable_activation_checkpointing=True",
        "LoRA and checkpointing: model=torchtune.models.llama2.lora_llama2, rank 8",
        "4 ranks",
        "rows of 512 tokens",
    ]
    assert result.asked == [
        Asked(checkpointed, 1, (4096,)),
        Asked(lora, 1, (4096,)),
        *(Asked(as_it_is, ranks, (4096,)) for ranks in (2, 4)),
        *(Asked(as_it_is, 1, (seq_len,)) for seq_len in (2048, 1024, 512)),
    ]
    for suggestion, asked in zip(result.found, [*result.asked[:2], result.asked[3], result.asked[-1]], strict=True):
        card = Card(memory_bytes=80 * GIB)
        again = gives(as_a_model_would(asked))
        own = plan(asked.cfg, world_size=asked.world_size, card=card, seq_lens=asked.seq_lens, traced_by=again)
        assert suggestion.length == own.lengths[0]


def test_lora_is_planned_with_the_arguments_of_the_model_and_as_its_recipe_takes_it() -> None:
    cfg = helped(full_cfg()).asked[1].cfg
    assert cfg.model.items() >= (FULL_CFG["model"] | {"_component_": "torchtune.models.llama2.lora_llama2"}).items()
    assert list(cfg.model.lora_attn_modules) == ["q_proj", "v_proj", "output_proj"]
    assert (cfg.enable_activation_checkpointing, cfg.ac_mode, cfg.optimizer_in_bwd) == (True, None, False)


@pytest.mark.parametrize(("held_gib", "ranks"), [(100, 2), (200, 4), (900, 16), (10**6, 512)])
def test_of_more_ranks_the_first_number_that_fits_is_suggested_else_the_last(held_gib: int, ranks: int) -> None:
    def shared(asked: Asked) -> TracedStep:
        return step_of(peaks(asked.seq_lens[0], held_bytes=held_gib * GIB / asked.world_size, bytes_per_row=GIB))

    result = helped(full_cfg(), shared, seq_len=512)
    assert result.changes[-1] == f"{ranks} ranks"
    assert ranks_asked(result) == [2**exponent for exponent in range(1, ranks.bit_length())]
    length = result.found[-1].length
    assert length is not None
    assert (length.exact_batch_size == 0) == (held_gib == 10**6)


@pytest.mark.parametrize(
    ("gib_per_row_of_512", "seq_len", "tried"),
    [
        (20, 4096, [2048, 1024]),
        (8, 4096, [2048]),
        (40, 4096, [2048, 1024, 512]),
        (10**6, 512, []),
        (10**6, 1023, []),
        (10**6, 1024, [512]),
        (10**6, 3000, [1500, 750]),
    ],
)
def test_of_shorter_rows_down_to_512_tokens_the_longest_that_fit_are_suggested(
    gib_per_row_of_512: int, seq_len: int, tried: list[int]
) -> None:
    def per_token(asked: Asked) -> TracedStep:
        tokens = asked.seq_lens[0]
        return step_of(peaks(tokens, held_bytes=GIB, bytes_per_row=gib_per_row_of_512 * GIB * tokens / 512))

    result = helped(full_cfg(), per_token, seq_len=seq_len)
    assert [asked.seq_lens[0] for asked in result.asked if asked.seq_lens[0] != seq_len] == tried
    assert [one for one in result.changes if one.startswith("rows")] == [f"rows of {one} tokens" for one in tried[-1:]]


def test_a_suggestion_that_cannot_be_planned_has_the_reason_and_the_others_are_planned() -> None:
    def without_lora(asked: Asked) -> TracedStep:
        if "lora_attn_modules" in asked.cfg.model:
            raise InputError("`model` must be anything else.")
        return as_a_model_would(asked)

    result, usual = helped(full_cfg(), without_lora), helped(full_cfg())
    assert result.found[1] == Suggestion(usual.changes[1], None, "`model` must be anything else.")
    assert [result.found[0], *result.found[2:]] == [usual.found[0], *usual.found[2:]]


def test_more_ranks_are_not_tried_where_one_number_of_them_is_refused() -> None:
    def on_two_ranks(asked: Asked) -> TracedStep:
        if asked.world_size > 2:
            raise InputError("too many.")
        return step_of(peaks(asked.seq_lens[0], held_bytes=10**6 * GIB, bytes_per_row=GIB))

    result = helped(full_cfg(), on_two_ranks, seq_len=512)
    assert ranks_asked(result) == [2, 4]
    assert result.found[-1] == Suggestion("4 ranks", None, "too many.")


CHECKPOINTED = {"enable_activation_checkpointing": True}
CHECKPOINTING = "enable_activation_checkpointing=True"


@pytest.mark.parametrize(
    ("cfg", "change"),
    [
        (lora_cfg(), "LoRA"),
        (full_cfg(model={"_component_": "tests.plan.test_decide.full_cfg"}), "LoRA"),
        (full_cfg(model={"_component_": "torchtune.models.llama2.no_such_model"}), "LoRA"),
        (full_cfg(**CHECKPOINTED), CHECKPOINTING),
        (lora_cfg(**CHECKPOINTED), CHECKPOINTING),
    ],
    ids=["LoRA already", "a model of others", "no LoRA version", "full, checkpointed", "LoRA, checkpointed"],
)
def test_a_change_that_a_config_has_or_cannot_have_is_not_suggested(cfg: DictConfig, change: str) -> None:
    assert not any(one.startswith(change) for one in helped(cfg).changes)
    assert (CHECKPOINTING in helped(cfg).changes) == (change == "LoRA")


# ---- as text


def some_plan(**changes: Any) -> Plan:
    """Rows of two lengths on eight ranks; the longer ones do not fit."""
    lengths = [
        peaks(2048, held_bytes=10 * GIB, bytes_per_row=5 * GIB),
        peaks(8192, held_bytes=10 * GIB, bytes_per_row=90 * GIB),
    ]
    return planned(cfg_of(margin=0.05), step_of(*lengths, **changes), world_size=8)


def test_the_text_says_how_much_the_card_or_a_memory_limit_allows_a_process() -> None:
    step = step_of(peaks(64, held_bytes=1, bytes_per_row=1))
    second = plan_text(some_plan(), title="any").splitlines()[1]
    assert second == "8 ranks of 80.0 GiB; margin kept free: 5 % of what torch's allocator may use (3.9 GiB)"
    limited = planned(cfg_of(memory_limit="30GiB", margin=0.1), step)
    assert (
        plan_text(limited, title="any").splitlines()[1]
        == "1 rank of 80.0 GiB, limited to 31.2 GiB; margin kept free: 10 % of what torch's allocator may use (3.0 GiB)"
    )
    assert plan_json(limited, [])["usable_bytes"] == 27 * GIB + limited.overhead.outside_bytes


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        ({}, "any: 8.03 B parameters in 32 layers, extrapolated from models of 4 and 6 layers"),
        (
            {"num_parameters": 9_270_000_000, "num_frozen_parameters": 8_030_000_000, "traced_layers": (32,)},
            "any: 1.24 B parameters in 32 layers; 8.03 B in a frozen model",
        ),
        (
            {"num_parameters": 494_030_000, "num_layers": 2, "traced_layers": (2,)},
            "any: 494.03 M parameters in 2 layers",
        ),
    ],
)
def test_the_text_counts_parameters_and_names_smaller_models_only_if_they_were_traced(
    figures: dict[str, Any], line: str
) -> None:
    assert plan_text(some_plan(**figures), title="any").splitlines()[0] == line


def test_the_table_of_sizes_has_the_figures_of_each_length_of_rows() -> None:
    found = some_plan()
    header, fits, not_one = tables(plan_text(found, title="any"))[0]
    assert header[:5] == ["tokens per row", "largest batch", "safe batch", "used", "tokens per step"]
    assert header[5:] == ["traced", "allocated", "reserved", "process", "uncertainty"]
    short, long = found.lengths
    assert fits[:5] == [
        "2048",
        str(short.exact_batch_size),
        str(short.certain_batch_size),
        str(short.batch_size),
        f"{short.tokens_per_step:,}",
    ]
    assert not_one[:5] == ["8192", "0", "0", "(1)", f"{8192 * 8:,}"]
    for row, length in ((fits, short), (not_one, long)):
        figures = [length.peak_bytes, length.allocated_bytes, length.reserved_bytes, length.process_bytes]
        for cell, num_bytes in zip(row[5:], [*figures, length.uncertainty_bytes], strict=True):
            assert cell == f"{num_bytes / GIB:.1f} GiB"


def test_two_tables_have_the_peak_of_each_phase_and_what_the_highest_holds() -> None:
    found = some_plan()
    _, phases, kinds, _ = tables(plan_text(found, title="any"))
    assert phases[0] == ["tokens per row", "batch", "backward", "optimizer"]
    assert kinds[0] == ["tokens per row", "batch", "parameters", "activations"]
    for table, figures in ((phases, "phases"), (kinds, "kinds")):
        for row, length in zip(table[1:], found.lengths, strict=True):
            in_gib = [f"{num_bytes / GIB:.2f}" for num_bytes in getattr(length, figures).values()]
            assert row == [str(length.seq_len), str(length.batch_size), *in_gib]


def test_a_table_has_the_host_memory_of_a_machine_by_what_a_run_does() -> None:
    host = HostFigures(weights=16 * GIB, load_copies=GIB, trained=2 * GIB, state=4 * GIB)
    text = plan_text(some_plan(host=host), title="any")
    header, *rows = tables(text)[-1]
    of_one = (PROCESS_BYTES + CUDA_PROCESS_BYTES) / GIB
    assert header == ["while the run is", "tensors", f"with {of_one:.1f} GiB per process"]
    assert [row[:2] for row in rows] == [
        ["loading the checkpoint", "8.00"],
        ["searching for the batch size", "16.00"],
        ["searching again", "48.00"],
        ["training", "0.00"],
        ["saving a checkpoint", "16.00"],
    ]
    assert [row[2] for row in rows] == [f"{8 * of_one + float(held):.2f}" for _, held, _ in rows]
    assert "Host memory of a machine with 8 ranks, in GiB:" in text
    assert f"Peak: {8 * of_one + 48:.1f} GiB. " in text
    assert "\nCheckpoint files (16.0 GiB) are not counted: " in text


def test_the_text_has_notes_on_what_is_elsewhere() -> None:
    def text_of(*, device: str = "cuda", **figures: Any) -> str:
        step = step_of(peaks(64, held_bytes=1, bytes_per_row=1), host=HostFigures(**figures))
        return plan_text(planned(cfg_of(device=device), step), title="any")

    disk = "\nA search needs up to 6.0 GiB of disk space in TMPDIR for its copies.\n"
    assert disk in text_of(device="cpu", trained=2 * GIB, state=4 * GIB)
    assert "overhead" in text_of(device="cpu").splitlines()[-1]
    assert "\nOverhead of the GPU, added to" not in text_of(device="cpu")
    assert "\nOverhead of the GPU, added to" in text_of()
    assert "TMPDIR" not in text_of(trained=2 * GIB, state=4 * GIB)
    on_host = "\nParameters, gradients and optimizer state are in host memory."
    offloaded: dict[str, Any] = {"offloaded_weights": GIB, "offloaded": 4 * GIB}
    assert f"{on_host} With one rank, their copies on the GPU are not counted.\n" in text_of(**offloaded)
    assert f"{on_host}\n" in plan_text(some_plan(host=HostFigures(**offloaded)), title="any")
    assert on_host not in text_of(offloaded=GIB)  # paged optimizer state alone
    paged = "Not counted: 3.0 GiB of optimizer state in paged memory, which can move to the host."
    assert plan_text(some_plan(paged_bytes=3 * GIB), title="any").splitlines()[-1] == paged
    assert "paged" not in plan_text(some_plan(), title="any")


def test_host_memory_is_that_of_the_batch_to_use_or_the_largest_asked_for() -> None:
    step = step_of(peaks(64, held_bytes=GIB, bytes_per_row=GIB), sequences=2, host=HostFigures(activations={"8": 1}))
    fits = planned(cfg_of(), step)
    tokens = fits.lengths[0].batch_size * 2 * 64
    assert fits.host.tensor_bytes["training"] == pinned_bytes(8 * tokens)
    asked = planned(cfg_of(), step, batch_sizes=[1, 2])
    assert asked.host.tensor_bytes["training"] == pinned_bytes(8 * 2 * 2 * 64) < pinned_bytes(8 * tokens)
    on_cpu = planned(cfg_of(device="cpu"), step, batch_sizes=[1, 2])
    assert on_cpu.host.tensor_bytes["training"] == 3 * GIB


def test_the_tables_are_those_of_the_batches_asked_for() -> None:
    step = step_of(peaks(2048, held_bytes=10 * GIB, bytes_per_row=5 * GIB))
    first, second, phases, kinds, _ = tables(plan_text(planned(cfg_of(), step, batch_sizes=[2, 90]), title="any"))
    assert first[0][1] == "largest batch"
    assert [row[:3] for row in second] == [
        ["tokens per row", "batch", "fits"],
        ["2048", "2", "yes"],
        ["2048", "90", "no"],
    ]
    assert [row[4] for row in second[1:]] == ["20.0 GiB", "460.0 GiB"]
    assert [row[:3] for row in phases[1:]] == [["2048", "2", "20.00"], ["2048", "90", "460.00"]]
    assert [row[1] for row in kinds[1:]] == ["2", "90"]


def test_a_suggestion_says_in_one_line_what_it_brings() -> None:
    fits, not_one = some_plan().lengths
    needed = not_one.process_bytes / GIB
    largest = f"2 ranks: largest batch_size {fits.exact_batch_size} (rows of 2048 tokens)"
    assert suggestion_text(Suggestion("2 ranks", fits)) == largest
    assert suggestion_text(Suggestion("2 ranks", not_one)) == (
        f"2 ranks: does not fit either; one row of 8192 tokens needs {needed:.1f} GiB"
    )
    assert suggestion_text(Suggestion("2 ranks", None, "`x` is wrong.")) == "2 ranks: not planned, `x` is wrong."
    without_end = dataclasses.replace(fits, exact_batch_size=None)
    assert "largest batch_size any" in suggestion_text(Suggestion("2 ranks", without_end))


# ---- as JSON


def test_the_json_holds_the_whole_plan_and_its_suggestions() -> None:
    found = some_plan(paged_bytes=7)
    suggested = [Suggestion("2 ranks", found.lengths[0]), Suggestion("LoRA", None, "`model` is wrong.")]
    content = json.loads(json.dumps(plan_json(found, iter(suggested))))
    assert {key: value for key, value in content.items() if not isinstance(value, list | dict)} == {
        "world_size": 8,
        "memory_bytes": 80 * GIB,
        "usable_bytes": round(found.usable_bytes),
        "margin": 0.05,
        "num_parameters": 8_030_000_000,
        "num_frozen_parameters": 0,
        "num_layers": 32,
        "paged_bytes": 7,
        "step": None,
    }
    assert content["traced_layers"] == [4, 6]
    assert content["overhead"] == dataclasses.asdict(found.overhead)
    figures = json.dumps([dataclasses.asdict(length) for length in found.lengths])
    assert content["lengths"] == json.loads(figures, parse_float=lambda num_bytes: round(float(num_bytes)))
    assert isinstance(content["lengths"][0]["process_bytes"], int)
    assert set(content["lengths"][0]) == {field.name for field in dataclasses.fields(LengthPlan)}
    assert content["suggestions"] == [
        {"change": "2 ranks", "length": content["lengths"][0], "refused": ""},
        {"change": "LoRA", "length": None, "refused": "`model` is wrong."},
    ]


def test_every_key_of_the_json_is_documented_in_its_table() -> None:
    document = (Path(__file__).parents[2] / "docs" / "plan_json.md").read_text(encoding="utf-8")
    documented = [
        {key for row in re.findall(r"^\| (`.*?`) \|", part, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
        for part in re.split(r"^(?:`overhead`|`host`|Each of .*):$", document, flags=re.MULTILINE)
    ]
    content = plan_json(some_plan(), [Suggestion("2 ranks", None, "`x` is wrong.")])
    parts = [content, content["overhead"], content["host"], content["lengths"][0], content["suggestions"][0]]
    assert documented == [set(part) for part in parts]
    assert {field.name for field in dataclasses.fields(SizePlan)} < documented[3]


def test_host_memory_in_the_json_is_in_whole_bytes() -> None:
    found = planned(cfg_of(device="cpu"), step_of(peaks(64, held_bytes=GIB, bytes_per_row=1.5)), batch_sizes=[1])
    host = plan_json(found, [])["host"]
    assert found.host.tensor_bytes["training"] == GIB + 1.5
    assert host["tensor_bytes"]["training"] == round(GIB + 1.5)
    assert all(isinstance(num_bytes, int) for num_bytes in (host["peak_bytes"], *host["tensor_bytes"].values()))

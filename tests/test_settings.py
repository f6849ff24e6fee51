"""The config's keys are read once, checked, and refused with one sentence that quotes the value."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from torchtune_adaptive.engine.search.options import STRATEGIES, SearchOptions
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.schedule import geometric
from torchtune_adaptive.settings import BLOCK_KEYS, AdaptiveSettings, named_by_path
from torchtune_adaptive.text import parse_memory

SEARCH: dict[str, Any] = {"use_maximum_batch_size": True}
GROWS: dict[str, Any] = {"batch_increase_function": f"{__name__}.grow_by_two"}


def read(**keys: Any) -> AdaptiveSettings:
    return AdaptiveSettings.from_cfg(OmegaConf.create(keys))


def refusal(**keys: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(**keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def grow_by_two(epoch: int, current_batch_size: int) -> int:
    return 2


# ---- what a config may hold


@pytest.mark.parametrize("cfg", [{}, {"adaptive": None}, {"adaptive": {}}, {"batch_increase_function": None}])
def test_config_without_adaptive_values_gives_the_defaults(cfg):
    settings = read(batch_size=4, max_seq_len=512, **cfg)
    assert settings == AdaptiveSettings()
    assert not settings.searches


def test_a_search_is_done_as_the_config_says():
    options = {"strategy": "binary_search", "power_of_two": False, "margin": 0.1, "max_batch_size": 96}
    settings = read(adaptive=options | {"memory_limit": "1.5GiB"})
    assert settings.search_options == SearchOptions(**options, memory_limit_bytes=3 * 2**29)  # pyright: ignore[reportArgumentType]


def beyond_memory(**more: Any) -> dict[str, Any]:
    return GROWS | {"adaptive": {"growth_limit": "none"} | more}


@pytest.mark.parametrize(
    ("keys", "searches", "on_cpu"),
    [
        (SEARCH, True, True),
        (GROWS, True, True),
        ({"adaptive": {"max_tokens_per_micro_batch": "auto"}}, True, True),
        ({"adaptive": {"max_tokens_per_micro_batch": 4096, "global_batch_size": 64}}, False, False),
        ({"adaptive": {"max_batch_size": 8, "growth_limit": "none"}}, False, False),
        # Growth beyond memory uses a search only to cut its steps, where memory has a limit.
        (beyond_memory(), True, False),
        (beyond_memory(growth_limit=64), True, False),
        (beyond_memory(memory_limit="1GiB"), True, True),
        (beyond_memory(max_tokens_per_micro_batch="auto"), True, True),
        (SEARCH | beyond_memory(), True, True),
    ],
)
def test_a_search_runs_for_the_largest_size_for_growth_and_for_an_automatic_budget(keys, searches, on_cpu):
    settings = read(**keys)
    found = settings.searches, settings.searches_on("cuda"), settings.searches_on("cpu")
    assert found == (searches, searches, on_cpu)


def test_interpolations_resolve_also_inside_of_a_component_and_the_config_stays_as_it_is():
    keys = {
        "growth": {"every": 3},
        "limits": {"memory": "2GiB"},
        "adaptive": {"margin": 0, "memory_limit": "${limits.memory}"},
        "batch_increase_function": {
            "_component_": "torchtune_adaptive.schedule.geometric",
            "every_epochs": "${growth.every}",
        },
    }
    cfg = OmegaConf.create(keys)
    OmegaConf.set_readonly(cfg, True)
    OmegaConf.set_struct(cfg, True)
    settings = AdaptiveSettings.from_cfg(cfg)
    assert settings.memory_limit_bytes == 2 * 2**30
    assert settings.batch_increase_function == geometric(every_epochs=3)
    assert OmegaConf.to_container(cfg) == keys
    assert OmegaConf.is_readonly(cfg)
    assert read(mine={"margin": 0.5}, adaptive="${mine}").margin == 0.5


# ---- values

TAKEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("power_of_two", "oom_recovery", "save_in_background", "search_only"), (True, False)),
    **dict.fromkeys(("max_batch_size", "seq_len", "max_images", "global_batch_size"), (None, 1, 4096)),
    **dict.fromkeys(("save_every_n_steps", "keep_last_n_checkpoints"), (None, 1, 4096)),
    "max_tokens_per_micro_batch": (None, "auto", 1, 4096),
    "growth_limit": ("memory", "none", 1, 4096),
    "margin": (0, 0.5, 0.999),
    "lr_scaling": ("none", "sqrt", "linear"),
    "objective": ("memory", "speed"),
    "strategy": STRATEGIES,
}
NOWHERE = (-3, -0.1, 1.0, 8.0, math.nan, math.inf, "8", "yes", "atuo", "None", "AUTO", "", [8], ["sqrt"], {"a": 1})
VALUES = {repr(value): value for value in (*NOWHERE, *(value for values in TAKEN.values() for value in values))}


@pytest.mark.parametrize("name", TAKEN)
def test_each_key_takes_its_values_and_refuses_all_others(name):
    taken = {repr(value) for value in TAKEN[name]}
    for quoted, value in VALUES.items():
        keys = SEARCH | {"adaptive": {name: value}}
        if quoted in taken:
            assert getattr(read(**keys), name) == value
        else:
            assert f"but is {quoted} instead" in refusal(**keys)


def test_every_key_is_tried():
    assert {*TAKEN, "memory_limit"} == {*BLOCK_KEYS}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("oom_recovery", "yes", "True or False, but is 'yes' instead."),
        ("growth_limit", 0, "at least 1, but is 0 instead."),
        ("max_tokens_per_micro_batch", "atuo", "null, auto or an integer, but is 'atuo' instead."),
        ("margin", math.nan, "in [0, 1), but is nan instead."),
        ("objective", "MEMORY", "one of memory, speed, but is 'MEMORY' instead; did you mean `memory`?"),
    ],
)
def test_a_refusal_says_the_rule(name, value, rule):
    assert refusal(adaptive={name: value}) == f"`adaptive.{name}` must be {rule}"


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("margn", "; did you mean `adaptive.margin`?"),
        ("use_maximum_batch_size", "; did you mean `use_maximum_batch_size`?"),
        (3, f", only {', '.join(BLOCK_KEYS)}."),
    ],
)
def test_unknown_key_of_the_block_is_refused_with_a_name_like_it_or_else_all_names(key, known):
    assert refusal(adaptive={key: 1}) == f"`adaptive` has no key {key!r}{known}"


@pytest.mark.parametrize("value", ["80GiB", 0])
def test_block_that_is_not_a_mapping_is_refused(value):
    assert refusal(adaptive=value) == f"`adaptive` must be a mapping, but is {value!r} instead."


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        ({"adaptive": {"margin": "???"}}, "`adaptive` has no value: MissingMandatoryValue"),
        ({"use_maximum_batch_size": "${nowhere}"}, "`use_maximum_batch_size` has no value: InterpolationKeyError"),
    ],
)
def test_value_that_does_not_resolve_is_refused(keys, start):
    assert refusal(**keys).startswith(start)


def test_a_key_of_ours_is_named_by_its_path_in_the_config():
    class OwnError(InputError): ...

    with pytest.raises(OwnError) as refused, named_by_path(), named_by_path():
        raise OwnError("`seq_len: 1` needs `margin` with `batch_size`, but is `adaptive.seq_len` or tokenizer.seq_len.")
    assert str(refused.value) == (
        "`adaptive.seq_len: 1` needs `adaptive.margin` with `batch_size`, but is `adaptive.seq_len` or"
        " tokenizer.seq_len."
    )


# ---- values that contradict each other

ONLY = {"search_only": True}


@pytest.mark.parametrize(
    ("keys", "settings", "sentence"),
    [
        (GROWS, {"global_batch_size": 64}, "A growing `adaptive.global_batch_size` needs `adaptive.growth_limit: "),
        ({}, {"objective": "speed"}, "`adaptive.objective: speed` needs `use_maximum_batch_size: True`."),
        (
            SEARCH,
            {"objective": "speed", "max_tokens_per_micro_batch": "auto"},
            "`adaptive.objective: speed` cannot be combined with `adaptive.max_tokens_per_micro_batch: auto`: ",
        ),
        ({}, ONLY, "`adaptive.search_only: True` needs `use_maximum_batch_size: True` or "),
        (GROWS, ONLY, "`adaptive.search_only: True` cannot be combined with a `batch_increase_function`: "),
        (
            SEARCH,
            ONLY | {"lr_scaling": "sqrt"},
            "`adaptive.search_only: True` cannot be combined with `adaptive.lr_scaling: sqrt`, ",
        ),
        (
            SEARCH,
            ONLY | {"global_batch_size": 8, "max_tokens_per_micro_batch": 512},
            "`adaptive.search_only: True` has nothing to search for with `adaptive.global_batch_size` and ",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(keys, settings, sentence):
    assert refusal(**keys, adaptive=settings).startswith(sentence)


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        (GROWS, {"global_batch_size": 64, "growth_limit": "none"}),
        (GROWS, {"global_batch_size": 64, "growth_limit": 512}),
        (SEARCH, ONLY | {"global_batch_size": 64, "objective": "speed"}),
        ({}, ONLY | {"max_tokens_per_micro_batch": "auto", "lr_scaling": "linear", "global_batch_size": 8}),
        (SEARCH, ONLY | {"max_tokens_per_micro_batch": 512}),
    ],
)
def test_settings_that_go_together_are_taken(keys, settings):
    taken = read(**keys, adaptive=settings)
    assert {name: getattr(taken, name) for name in settings} == settings


# ---- memory

BINARY, DECIMAL = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}, {"KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS = BINARY | DECIMAL | {"TB": 10**12, "B": 1, "": 1}


@given(
    eighths=st.integers(1, 10**6),
    unit=st.sampled_from([*UNITS]),
    change=st.sampled_from([str.upper, str.lower, str.title]),
    space=st.sampled_from(["", " ", "  "]),
)
def test_memory_written_with_any_unit_is_read_as_whole_bytes(eighths, unit, change, space):
    expected = eighths * UNITS[unit] // 8
    written = f"{space}{eighths / 8}{space}{change(unit)}{space}"
    if expected:
        assert parse_memory(written) == expected
        assert type(parse_memory(written)) is int


def test_memory_may_be_a_number():
    sizes = [read(adaptive={"memory_limit": value}).memory_limit_bytes for value in (512, 8e9, " .5 kib ", "0.1GB")]
    assert sizes == [512, 8 * 10**9, 512, 10**8]
    assert {type(size) for size in sizes} == {int}


UNREADABLE = ("80 bananas", "GiB", "80G", "1e9", "1,5GiB", "80_000", "8 0GiB", "--1GiB", "٨GiB", "nan", "0x10")
UNREADABLE += ("1GiB\0", f"{10**20}B", True, math.nan, math.inf, 0.5, [80], {"a": 1}, b"1GiB")


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("a size like 80GiB or whole bytes", UNREADABLE),
        ("at least one byte", (0, -1, "0GiB", "-5GiB", "0.0001B", -2.0)),
    ],
)
def test_memory_that_cannot_be_read_or_is_not_above_zero_is_refused(rule, values):
    hints = {"80G": "; did you mean `80GiB`?", 0.5: "; did you mean `0.5GiB`?"}
    for value in values:
        sentence = f"`adaptive.memory_limit` must be {rule}, but is {value!r} instead"
        hint = hints.get(value, ".") if isinstance(value, str | float) else "."
        assert refusal(adaptive={"memory_limit": value}) == sentence + hint


@given(st.text("019.,-+_eEKMgiB \n\0٨é", max_size=6))  # not every letter: to list them takes Hypothesis seconds
def test_memory_text_is_read_or_refused_and_never_fails_otherwise(text):
    with contextlib.suppress(InputError):
        assert parse_memory(text) > 0

"""The config's keys are read once, checked, and refused with one sentence that quotes the value."""

import contextlib
import math
import sys
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.engine.search.options import SearchOptions
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.schedule import geometric
from torchtune_adaptive.settings import BLOCK_KEYS, CONFIG_KEYS, STRATEGIES, AdaptiveSettings
from torchtune_adaptive.stock.installed import stock_recipe_files
from torchtune_adaptive.text import parse_memory

HERE = __name__
LISTED = ", ".join(BLOCK_KEYS)
COMPONENT = "torchtune_adaptive.schedule"


def read(**keys: Any) -> AdaptiveSettings:
    return AdaptiveSettings.from_cfg(OmegaConf.create(keys))


def refusal(**keys: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(**keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def grow_by_two(epoch: int, current_batch_size: int) -> int:
    return 2


def too_few(epoch):
    return 2


def make_grower(amount=2):
    return grow_by_two if amount == 2 else None


def break_down(**arguments):
    raise RuntimeError("first line\nsecond line")


# ---- valid configs


@pytest.mark.parametrize("cfg", [{}, {"adaptive": None}, {"adaptive": {}}, {"batch_increase_function": None}])
def test_config_without_adaptive_values_gives_the_defaults(cfg):
    settings = read(batch_size=4, **cfg)
    assert settings == AdaptiveSettings()
    assert not settings.searches


def test_every_key_is_read():
    block = {
        "strategy": "binary_search",
        "power_of_two": False,
        "max_batch_size": 96,
        "margin": 0.1,
        "seq_len": 2048,
        "max_images": 2,
        "oom_recovery": False,
        "global_batch_size": 256,
        "max_tokens_per_micro_batch": 8192,
        "growth_limit": 1024,
        "lr_scaling": "sqrt",
        "objective": "throughput",
        "save_every_n_steps": 100,
        "keep_last_n_checkpoints": 3,
        "save_in_background": True,
    }
    function, limit = {"batch_increase_function": f"{HERE}.grow_by_two"}, {"memory_limit": "1.5GiB"}
    settings = read(use_maximum_batch_size=True, adaptive=block | limit, **function)
    given = block | {"memory_limit_bytes": 3 * 2**29, "batch_increase_function": grow_by_two}
    assert settings == AdaptiveSettings(use_maximum_batch_size=True, **given)
    assert {key.name for key in CONFIG_KEYS} == {*block, *limit, *function, "use_maximum_batch_size", "search_only"}
    assert settings.search_options == SearchOptions(
        strategy="binary_search", power_of_two=False, margin=0.1, memory_limit_bytes=3 * 2**29, max_batch_size=96
    )


@pytest.mark.parametrize(
    ("keys", "searches"),
    [
        ({"adaptive": {"max_tokens_per_micro_batch": "auto"}}, True),
        ({"adaptive": {"max_tokens_per_micro_batch": 4096, "global_batch_size": 64, "lr_scaling": "sqrt"}}, False),
        ({"use_maximum_batch_size": True}, True),
        ({"batch_increase_function": f"{HERE}.grow_by_two"}, True),
        ({"adaptive": {"max_batch_size": 8}}, False),
    ],
)
def test_search_runs_for_the_largest_size_for_growth_and_for_an_automatic_budget(keys, searches):
    assert read(**keys).searches is searches


GROWS_BEYOND = {"batch_increase_function": f"{HERE}.grow_by_two", "adaptive": {"growth_limit": "none"}}


@pytest.mark.parametrize(
    ("keys", "on_cpu", "on_cuda"),
    [
        (GROWS_BEYOND, False, True),
        (GROWS_BEYOND | {"adaptive": {"growth_limit": 64}}, False, True),
        (GROWS_BEYOND | {"adaptive": {"growth_limit": "none", "memory_limit": "1GiB"}}, True, True),
        (GROWS_BEYOND | {"adaptive": {"growth_limit": "memory"}}, True, True),
        (GROWS_BEYOND | {"use_maximum_batch_size": True}, True, True),
        (GROWS_BEYOND | {"adaptive": {"growth_limit": "none", "max_tokens_per_micro_batch": "auto"}}, True, True),
        ({"adaptive": {"growth_limit": "none"}}, False, False),
    ],
)
def test_growth_beyond_memory_is_searched_for_only_where_memory_has_a_limit(keys, on_cpu, on_cuda):
    settings = read(**keys)
    assert (settings.searches_on("cpu"), settings.searches_on("cuda")) == (on_cpu, on_cuda)


def test_interpolations_resolve_also_inside_of_a_component():
    settings = read(
        seq_len=512,
        growth={"every": 3},
        limits={"memory": "2GiB"},
        adaptive={"seq_len": "${seq_len}", "memory_limit": "${limits.memory}"},
        batch_increase_function={"_component_": f"{COMPONENT}.geometric", "every_epochs": "${growth.every}"},
    )
    assert settings.seq_len == 512
    assert settings.memory_limit_bytes == 2 * 2**30
    assert settings.batch_increase_function == geometric(every_epochs=3)
    assert read(mine={"margin": 0.5}, adaptive="${mine}").margin == 0.5


def test_reading_does_not_change_the_config():
    keys = {
        "adaptive": {"memory_limit": "${limit}", "margin": 0},
        "limit": "1GiB",
        "batch_increase_function": {"_component_": f"{COMPONENT}.at_epochs", "increases": {1: 2}},
    }
    cfg, untouched = OmegaConf.create(keys), OmegaConf.create(keys)
    OmegaConf.set_readonly(cfg, True)
    OmegaConf.set_struct(cfg, True)
    AdaptiveSettings.from_cfg(cfg)
    assert OmegaConf.to_yaml(cfg) == OmegaConf.to_yaml(untouched)
    assert OmegaConf.is_readonly(cfg)


# ---- misspelt and misplaced keys


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("margn", "; did you mean `adaptive.margin`?"),
        ("memory_limit_bytes", "; did you mean `adaptive.memory_limit`?"),
        ("Strategy", "; did you mean `adaptive.strategy`?"),
        ("use_maximum_batch_size", "; did you mean `use_maximum_batch_size`?"),
        ("zzz", "."),
        (3, "."),
    ],
)
def test_unknown_key_of_the_block_is_refused_with_a_name_like_it_if_there_is_one(key, hint):
    assert refusal(adaptive={key: 1}) == f"A key of `adaptive` must be one of {LISTED}, but is {key!r} instead{hint}"


@pytest.mark.parametrize(("value", "quoted"), [(True, "True"), ("80GiB", "'80GiB'"), ([1], "[1]"), (0, "0")])
def test_block_that_is_not_a_mapping_is_refused(value, quoted):
    assert refusal(adaptive=value) == f"`adaptive` must be a mapping, but is {quoted} instead."


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("use_max_batch_size", "use_maximum_batch_size"),
        ("use-maximum-batch-size", "use_maximum_batch_size"),
        ("maximum_batch_size", "use_maximum_batch_size"),
        ("Use_Maximum_Batch_Size", "use_maximum_batch_size"),
        ("batch_increase_fn", "batch_increase_function"),
        ("batch_size_increase_function", "batch_increase_function"),
        ("adaptve", "adaptive"),
        ("max-batch-size", "adaptive.max_batch_size"),
        *((name, f"adaptive.{name}") for name in BLOCK_KEYS if name != "seq_len"),
    ],
)
def test_top_level_key_that_resembles_an_adaptive_key_is_refused(key, meant):
    assert refusal(**{key: 1}) == (
        f"A top-level key must be one that the recipe reads, but is '{key}' instead; did you mean `{meant}`?"
    )


@pytest.mark.parametrize("key", ["seq_len", "max_seq_len", "adapter_path", "batch_size_val", "run_dir", 3])
def test_other_keys_at_the_top_level_pass(key):
    assert AdaptiveSettings.from_cfg(OmegaConf.create({key: 1})) == AdaptiveSettings()


@pytest.mark.slow
def test_no_stock_config_is_refused():
    paths = [path for files in stock_recipe_files().values() for path in files if path.suffix == ".yaml"]
    assert len(paths) > 100
    overrides = OmegaConf.from_dotlist(["use_maximum_batch_size=True", "adaptive.memory_limit=80GiB"])
    expected = AdaptiveSettings(use_maximum_batch_size=True, memory_limit_bytes=80 * 2**30)
    for path in paths:
        cfg = OmegaConf.merge(OmegaConf.load(path), overrides)
        assert isinstance(cfg, DictConfig)
        assert AdaptiveSettings.from_cfg(cfg) == expected, path


# ---- values


SWITCHES = ("power_of_two", "oom_recovery", "save_in_background", "search_only")
COUNTS = ("max_batch_size", "seq_len", "global_batch_size", "save_every_n_steps", "keep_last_n_checkpoints")
OTHERS = (True, False, 8.0, math.nan, "8", "atuo", "None", "AUTO", "Memory", "", [8], {"a": 1})


@pytest.mark.parametrize(
    ("names", "rule", "values"),
    [
        (SWITCHES, "True or False", ("yes", 1, None)),
        (COUNTS, "an integer", (True, 8.0, "8", [8])),
        ((*COUNTS, "max_tokens_per_micro_batch", "growth_limit"), "at least 1", (0, -3)),
        (("margin",), "in [0, 1)", (1, 1.5, -0.1, math.nan, math.inf, True, False, "0.1", None, [0.1])),
        (("max_tokens_per_micro_batch",), "null, auto or an integer", OTHERS),
        (("growth_limit",), "memory, none or an integer", (*OTHERS, None)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_of_another_type_or_out_of_its_range_is_refused(names, rule, values):
    for name, value in product(names, values):
        assert refusal(adaptive={name: value}) == f"`adaptive.{name}` must be {rule}, but is {value!r} instead."


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens_per_micro_batch", [None, "auto", 1, 8192]),
        ("growth_limit", ["memory", "none", 1, 512]),
        ("lr_scaling", ["none", "sqrt", "linear"]),
        ("objective", ["memory", "throughput"]),
        ("strategy", [*STRATEGIES]),
        ("margin", [0, 0.999]),
        *((name, [None, 1, 4096]) for name in COUNTS),
    ],
)
def test_each_word_and_number_that_a_key_allows_is_taken(name, values):
    taken = [read(use_maximum_batch_size=True, adaptive={name: value}) for value in values]
    assert [getattr(settings, name) for settings in taken] == values


@pytest.mark.parametrize(
    ("name", "words"),
    [("lr_scaling", ("none", "sqrt", "linear")), ("objective", ("memory", "throughput")), ("strategy", STRATEGIES)],
)
@pytest.mark.parametrize(
    ("value", "guess"),
    [
        (True, None),
        (None, "none"),
        (["sqrt"], "sqrt"),
        ("Linear", "linear"),
        ("MEMORY", "memory"),
        ("binary-search", "binary_search"),
        ("decrease", "decrease_until_oom"),
        ("guess", None),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest_allowed_word(name, words, value, guess):
    hint = f"; did you mean `{guess}`?" if guess in words else "."
    listed = ", ".join(words)
    assert (
        refusal(adaptive={name: value}) == f"`adaptive.{name}` must be one of {listed}, but is {value!r} instead{hint}"
    )


# ---- values that contradict each other

SEARCH: dict[str, Any] = {"use_maximum_batch_size": True}
ONLY = {"search_only": True}
GROWS = {"batch_increase_function": f"{HERE}.grow_by_two"}


@pytest.mark.parametrize(
    ("keys", "settings", "sentence"),
    [
        (
            GROWS,
            {"global_batch_size": 64},
            "`adaptive.growth_limit` must be none or a number where `adaptive.global_batch_size` grows, because memory"
            " bounds its micro-batches alone, but is memory instead.",
        ),
        (
            {},
            {"objective": "throughput"},
            "`use_maximum_batch_size` must be True for the objective throughput, which chooses among the sizes"
            " that a search found, but is False instead.",
        ),
        (
            SEARCH,
            {"objective": "throughput", "max_tokens_per_micro_batch": "auto"},
            "`adaptive.objective` must be memory where `adaptive.max_tokens_per_micro_batch` is auto,"
            " but is throughput instead.",
        ),
        (
            {},
            ONLY,
            "`use_maximum_batch_size` must be True with `adaptive.search_only`, or"
            " `adaptive.max_tokens_per_micro_batch` auto, but is False instead.",
        ),
        (
            GROWS,
            ONLY,
            "`batch_increase_function` must be null with `adaptive.search_only`, because a run whose batch grows"
            f" searches for its own bound, but is {grow_by_two!r} instead.",
        ),
        (
            SEARCH,
            ONLY | {"lr_scaling": "sqrt"},
            "`adaptive.lr_scaling` must be none with `adaptive.search_only`, because it scales from the `batch_size`"
            " that the search replaces, but is sqrt instead.",
        ),
        (
            SEARCH,
            ONLY | {"global_batch_size": 8, "max_tokens_per_micro_batch": 512},
            "`adaptive.max_tokens_per_micro_batch` must be null or auto with `adaptive.search_only` and"
            " `adaptive.global_batch_size`, because nothing is left to search for, but is 512 instead.",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(keys, settings, sentence):
    assert refusal(**keys, adaptive=settings) == sentence


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        (GROWS, {"global_batch_size": 64, "growth_limit": "none"}),
        (GROWS, {"global_batch_size": 64, "growth_limit": 512}),
        (SEARCH, ONLY),
        (SEARCH, ONLY | {"global_batch_size": 64, "objective": "throughput"}),
        ({}, ONLY | {"max_tokens_per_micro_batch": "auto", "lr_scaling": "linear", "global_batch_size": 8}),
        (SEARCH, ONLY | {"max_tokens_per_micro_batch": 512}),
    ],
)
def test_settings_that_go_together_are_taken(keys, settings):
    taken = read(**keys, adaptive=settings)
    assert {name: getattr(taken, name) for name in settings} == settings


def test_settings_made_without_a_config_are_checked_too():
    with pytest.raises(InputError) as caught:
        AdaptiveSettings(memory_limit_bytes=0)
    assert str(caught.value) == "`memory_limit_bytes` must be at least 1, but is 0 instead."
    with pytest.raises(InputError) as caught:
        AdaptiveSettings(batch_increase_function=too_few)  # pyright: ignore[reportArgumentType]
    assert "too_few takes (epoch) instead." in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        ({"adaptive": {"margin": "${nowhere}"}}, "`adaptive` must have a value, but has none: InterpolationKeyError"),
        ({"adaptive": {"margin": "???"}}, "`adaptive` must have a value, but has none: MissingMandatoryValue"),
        ({"adaptive": "${nowhere}"}, "`adaptive` must have a value, but has none: InterpolationKeyError"),
        (
            {"use_maximum_batch_size": "${oc.env:NO_SUCH_VARIABLE_AT_ALL}"},
            "`use_maximum_batch_size` must have a value, but has none: InterpolationResolutionError",
        ),
    ],
)
def test_value_that_does_not_resolve_is_refused(keys, start):
    assert refusal(**keys).startswith(start)


# ---- memory


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        ("1.5GiB", 3 * 2**29),
        (" .5 kib ", 512),
        ("0.1GB", 10**8),
        ("7 B", 7),
        (8e9, 8 * 10**9),
        (512, 512),
        ("1.0001KiB", 1024),
    ],
)
def test_memory_is_read_as_whole_bytes(value, size_bytes):
    assert parse_memory(value) == size_bytes
    assert type(parse_memory(value)) is int
    assert read(adaptive={"memory_limit": value}).memory_limit_bytes == size_bytes


UNREADABLE = ("80 bananas", "", "GiB", "80G", "1e9", "1,5GiB", "80_000", "8 0GiB", "--1GiB", "٨GiB", "nan", "0x10")
UNREADABLE += ("1GiB\0", f"{10**20}B", True, math.nan, math.inf, 0.5, [80], {"a": 1}, b"1GiB")


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("a size like 80GiB or whole bytes", UNREADABLE),
        ("at least one byte", (0, -1, "0GiB", "-5GiB", "0.0001B", -2.0)),
    ],
)
def test_memory_that_cannot_be_read_or_is_not_above_zero_is_refused(rule, values):
    for value in values:
        sentence = f"`adaptive.memory_limit` must be {rule}, but is {value!r} instead."
        assert refusal(adaptive={"memory_limit": value}) == sentence


@given(
    count=st.integers(1, 10**6),
    unit=st.sampled_from([("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40)])
    | st.sampled_from([("B", 1), ("KB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12)]),
    change=st.sampled_from([str.upper, str.lower, str.title, str.strip]),
    space=st.sampled_from(["", " ", "  "]),
)
def test_memory_written_with_any_unit_reads_back(count, unit, change, space):
    name, unit_bytes = unit
    assert parse_memory(f"{space}{count}{space}{change(name)}{space}") == count * unit_bytes


@given(st.text(max_size=12))
def test_memory_text_is_read_or_refused_and_never_fails_otherwise(text):
    with contextlib.suppress(InputError):
        assert parse_memory(text) > 0


# ---- the function


@pytest.mark.parametrize(("path", "answer"), [(f"{HERE}.grow_by_two", 2), ("operator.add", 9)])
def test_function_is_found_by_its_dotted_path(path, answer):
    function = read(batch_increase_function=path).batch_increase_function
    assert function is not None
    assert function(4, 5) == answer


def test_function_of_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_growth.py").write_text("def gentle(epoch, size):\n    return epoch\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    function = read(batch_increase_function="my_growth.gentle").batch_increase_function
    assert function is not None
    assert function(7, 1) == 7


@pytest.mark.parametrize(
    ("value", "rule", "found"),
    [
        ("no_such_module.grow", "importable", "is not: ModuleNotFoundError: No module named 'no_such_module'."),
        ("math.grow", "importable", "is not: AttributeError: module 'math' has no attribute 'grow'."),
        ("", "importable", "is not: ValueError: invalid format: ''."),
        ("math.pi", "callable", f"is {math.pi} instead."),
        (f"{HERE}.too_few", "", "takes (epoch) instead."),  # the rest: tests/test_schedule.py
        (f"{COMPONENT}.geometric", "a function", "is a class instead; to use a class, give it as `_component_`"),
        *(
            (value, "a dotted path or a mapping with a `_component_`", "instead.")
            for value in (8, ["a.b"], {"factor": 2}, {"_component_": None})
        ),
    ],
)
def test_a_function_that_is_not_there_or_not_a_function_is_refused(value, rule, found):
    sentence = refusal(batch_increase_function=value)
    assert sentence.startswith(
        f"`batch_increase_function` must {f'be {rule}, but' if rule else 'take two positional'} "
    )
    assert f"but {value!r} {found}" in sentence or sentence.endswith(f"but is {value!r} {found}")


@pytest.mark.parametrize(
    ("path", "arguments", "reason"),
    [
        (f"{COMPONENT}.geometric", {"factor": 1}, "`factor` must be at least 2, but is 1 instead"),
        (f"{HERE}.break_down", {}, "RuntimeError: first line second line"),
        ("math.pi", {}, "TypeError: 'float' object is not callable"),
    ],
)
def test_component_that_fails_is_refused_with_the_reason(path, arguments, reason):
    assert refusal(batch_increase_function={"_component_": path, **arguments}) == (
        f"`batch_increase_function` must be created by its `_component_`, but '{path}' with {arguments} "
        f"failed instead: {reason}."
    )


def test_component_must_make_a_function():
    assert refusal(batch_increase_function={"_component_": f"{HERE}.make_grower", "amount": 3}) == (
        f"`batch_increase_function` must be callable, but the result of '{HERE}.make_grower' is None instead."
    )
    assert read(batch_increase_function={"_component_": f"{HERE}.make_grower"}).batch_increase_function is grow_by_two

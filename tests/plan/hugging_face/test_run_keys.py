"""The keys of a run: read from a file and a command line, and sorted by what they configure."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.hugging_face import run_keys
from torchtune_adaptive.plan.hugging_face.run_keys import (
    Arguments,
    ModelKeys,
    RunKeys,
    TrainerClasses,
    imported,
    read_keys,
)

ARGUMENTS = Arguments(
    "MyArguments",
    {
        "learning_rate": "float",
        "max_steps": "int",
        "gradient_checkpointing": "bool",
        "bf16": "bool | None",
        "torch_compile": "bool",
        "gradient_checkpointing_kwargs": "dict[str, Any] | str | None",
        "deepspeed": "dict | str | None",
        "model_init_kwargs": "dict[str, Any] | str | None",
        "run_name": "str | None",
    },
)


def test_keys_of_a_file_and_of_the_command_line_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("max_length: 512\nfsdp_config:\n  reshard_after_forward: true\n  version: 2\nbf16: true\n")
    overrides = ["max_length=1024", "fsdp_config.reshard_after_forward=false", "a.b=[x, 1]", "optim=adamw_8bit"]
    expected = {
        "max_length": 1024,
        "fsdp_config": {"reshard_after_forward": False, "version": 2},
        "bf16": True,
        "a": {"b": ["x", 1]},
        "optim": "adamw_8bit",
    }
    assert read_keys(path, overrides) == expected
    path.write_text(json.dumps({"max_length": 8}))
    assert read_keys(path, []) == {"max_length": 8}
    assert read_keys(None, []) == {}


@pytest.mark.parametrize(
    ("content", "overrides", "sentence"),
    [
        (None, [], "`--training-args` '{path}' cannot be read: FileNotFoundError: "),
        ("[1, 2]", [], "`--training-args` must name a file of keys and values, but '{path}' has none."),
        ("a: 1", ["bf16"], "Keys of a run are given as key=value, not as 'bf16'."),
        ("a: 1", ["bf16=["], "The value of 'bf16=[' cannot be read: "),
        ("a: 1", ["a.b=2"], "'a.b=2' names a key of `a`, which is 1 and no mapping."),
    ],
)
def test_what_has_no_keys_is_refused(content: str | None, overrides: list[str], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError) as caught:
        read_keys(path, overrides)
    assert str(caught.value).startswith(sentence.format(path=path))


def test_keys_are_sorted_by_what_they_configure() -> None:
    given = {"use_peft": True, "lora_r": 4, "learning_rate": 0.1, "dataset_name": "mine", "deepspeed": None}
    assert RunKeys.of(given, ARGUMENTS) == RunKeys(ModelKeys(use_peft=True, lora_r=4), {"learning_rate": 0.1})


def test_the_source_has_the_fields_of_the_class() -> None:
    arguments = Arguments.of("transformers")
    given = [one.name for one in fields(TrainerClasses.named("transformers").arguments) if one.init]
    assert arguments.types.keys() == set(given)
    assert arguments.title == "TrainingArguments"


def test_a_class_that_is_defined_elsewhere_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Arguments.of("transformers").types
    some = ("bf16", "learning_rate", "max_steps", "optim_args")
    monkeypatch.setattr(run_keys, "_SOURCES", {"transformers": ("elsewhere.py",)})
    found = Arguments.of("transformers").types
    assert found.keys() == expected.keys()
    assert [found[name] for name in some] == [expected[name] for name in some]


def test_texts_are_read_as_the_trainers_own_parser_reads_them() -> None:
    given = {"lora_r": "8", "lora_dropout": "1e-1", "use_peft": "True", "bnb_4bit_quant_type": "fp4"}
    trained = {"learning_rate": "1e-4", "max_steps": "7", "bf16": "no", "gradient_checkpointing": "False"}
    trained |= {"run_name": "12", "gradient_checkpointing_kwargs": '{"use_reentrant": false, "debug": "true"}'}
    keys = RunKeys.of(given | trained, ARGUMENTS)
    assert keys.model == ModelKeys(lora_r=8, lora_dropout=0.1, use_peft=True, bnb_4bit_quant_type="fp4")
    assert keys.training == {
        "learning_rate": 1e-4,
        "max_steps": 7,
        "bf16": False,
        "gradient_checkpointing": False,
        "run_name": "12",
        "gradient_checkpointing_kwargs": {"use_reentrant": False, "debug": True},
    }


def test_what_a_model_is_loaded_with_is_read_unless_a_key_says_it() -> None:
    loaded = {"dtype": "bfloat16", "attn_implementation": "flash_attention_2", "device_map": "auto"}
    model = RunKeys.of({"model_init_kwargs": loaded}, ARGUMENTS).model
    assert (model.dtype, model.attn_implementation) == ("bfloat16", "flash_attention_2")
    assert RunKeys.of({"model_init_kwargs": loaded, "dtype": "float16"}, ARGUMENTS).model.dtype == "float16"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"lora_rang": 4},
            "'lora_rang' is no key of MyArguments or of TRL's ModelConfig; did you mean `lora_r`?",
        ),
        (
            {"use_lora": True},
            "'use_lora' is no key of MyArguments or of TRL's ModelConfig; did you mean `use_peft`?",
        ),
        ({"deepspeed": "ds.json"}, "`deepspeed=ds.json` is not planned: DeepSpeed's allocations are not traced."),
        ({"load_in_4bit": True, "load_in_8bit": True}, "`load_in_4bit` and `load_in_8bit` cannot both be True."),
        ({"use_cpu": True}, "`use_cpu=True` is not planned: a plan is of GPUs."),
        ({"bf16": "maybe"}, "`bf16` must be True or False, but is 'maybe' instead."),
        ({"bf16": [True]}, "`bf16` must be True or False, but is [True] instead."),
        ({"max_steps": [3]}, "`max_steps` must be an integer, but is [3] instead."),
        ({"lora_r": True}, "`lora_r` must be an integer, but is True instead."),
        ({"max_steps": "1e3"}, "`max_steps` must be an integer, but is '1e3' instead."),
        ({"lora_dropout": "much"}, "`lora_dropout` must be a number, but is 'much' instead."),
        (
            {"model_init_kwargs": "{dtype}"},
            "`model_init_kwargs` must be a mapping of keys, but is '{dtype}' instead.",
        ),
        ({"attn_implementation": 5}, "`attn_implementation` must be a word or null, but is 5 instead."),
        ({"bnb_4bit_quant_type": "int4"}, "`bnb_4bit_quant_type` must be one of nf4, fp4, but is 'int4' instead."),
        (
            {"model_init_kwargs": "bfloat16"},
            "`model_init_kwargs` must be a mapping of keys, but is 'bfloat16' instead.",
        ),
        (
            {"model_init_kwargs": {"use_kernels": True}},
            "`model_init_kwargs.use_kernels=True` is not planned: of these keys a plan reads dtype and"
            " attn_implementation.",
        ),
        (
            {"torch_dtype": "bfloat16"},
            "'torch_dtype' is no key of MyArguments or of TRL's ModelConfig; did you mean `dtype`?",
        ),
        (
            {"gradient_checkpointing_kwargs": {"offload": True}},
            "`gradient_checkpointing_kwargs.offload` is not planned; `activation_offloading` of TRL is.",
        ),
    ],
)
def test_what_is_unknown_or_not_planned_is_refused_by_name(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        RunKeys.of(given, ARGUMENTS)
    assert str(caught.value) == sentence


def test_a_missing_package_and_an_unknown_trainer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "trl", None)
    with pytest.raises(InputError) as caught:
        TrainerClasses.named("sft")
    assert str(caught.value) == "A plan of SFTTrainer of trl needs trl: `pip install trl` installs it."
    with pytest.raises(InputError) as caught:
        Arguments.of("sft")
    assert str(caught.value) == "A plan of SFTConfig of trl needs trl: `pip install trl` installs it."
    with pytest.raises(InputError) as caught:
        Arguments.of("adam")
    assert str(caught.value) == "`trainer` must be one of sft, dpo, transformers, but is 'adam' instead."


def test_a_package_that_is_there_but_cannot_be_imported_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("raise ImportError('needs a newer torch.')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as caught:
        imported("broken_package", needed_for="LoRA")
    assert str(caught.value) == (
        "'broken_package', which a plan of LoRA needs, cannot be imported: ImportError: needs a newer torch."
    )

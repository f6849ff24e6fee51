"""The keys of a run: those of the trainer's own configuration class, and those of TRL's `ModelConfig`.

Names and defaults of the model's keys are those of TRL 1.16 (``trl/trainer/model_config.py``).
"""

import ast
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, get_type_hints

from torchtune_adaptive.errors import InputError, as_integer, did_you_mean, is_number, quote, reason_of, require_one_of

# By the trainer's name in a command: its package, and the names of its class and of the class of its arguments.
_CLASSES = MappingProxyType(
    {
        "sft": ("trl", "SFTTrainer", "SFTConfig"),
        "dpo": ("trl", "DPOTrainer", "DPOConfig"),
        "transformers": ("transformers", "Trainer", "TrainingArguments"),
    }
)
TRAINERS = tuple(_CLASSES)
# Where these packages define the classes of arguments.
_SOURCES = MappingProxyType(
    {
        "trl": ("trainer/sft_config.py", "trainer/dpo_config.py", "trainer/base_config.py"),
        "transformers": ("training_args.py",),
    }
)
# Of a file for `trl sft --config`: what names the model, the data and the launch.
_OF_A_SCRIPT = frozenset(
    {
        *("model_name_or_path", "model_revision", "lora_task_type", "env", "datasets", "streaming", "test_split_size"),
        *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming"),
        *("ignore_bias_buffers", "trust_remote_code"),
    }
)
# Keys of data, checkpoints, evaluation and of how exact products are, which change no size in a step that is planned.
# The trainer gets these values instead: a plan has one row of its own, and neither saves nor evaluates.
NOT_OF_A_STEP = MappingProxyType(
    {
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "resume_from_checkpoint": None,
        "eval_on_start": False,
        "auto_find_batch_size": False,
        "dataset_num_proc": None,
        "dataset_kwargs": None,
        "assistant_only_loss": False,
        "completion_only_loss": None,
        "chat_template_path": None,
        "eos_token": None,
        "pad_token": None,
        "model_init_kwargs": None,
        "tf32": None,
    }
)
_RANKS = "`--nproc_per_node` and `--nnodes` say how many ranks there are"
# Keys whose values are mappings that a plan reads.
_MAPPINGS = (
    "fsdp_config",
    "model_init_kwargs",
    "liger_kernel_config",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs",
)
# Keys of `model_init_kwargs` that are read, or do not change the model. Others may change it.
_OF_LOADING = frozenset(
    {
        *("dtype", "torch_dtype", "attn_implementation", "use_cache", "device_map", "max_memory", "low_cpu_mem_usage"),
        *("trust_remote_code", "revision", "code_revision", "cache_dir", "token", "local_files_only", "force_download"),
        *("use_safetensors", "variant", "subfolder", "proxies", "offload_folder"),
    }
)
# The keys that are meant by words that are none.
_MEANT = MappingProxyType(
    {
        "torch_dtype": "dtype",
        "use_lora": "use_peft",
        "batch_size": "per_device_train_batch_size",
        "per_device_batch_size": "per_device_train_batch_size",
    }
)
# Keys that are not planned, unless they have one of these values; and what to do.
_NOT_PLANNED = MappingProxyType(
    {
        "deepspeed": ((None,), "DeepSpeed's allocations are not traced"),
        "parallelism_config": ((None,), "only data parallelism is planned"),
        "lora_target_parameters": ((None,), "adapters are planned of modules alone"),
        "use_cpu": ((False, None), "a plan is of GPUs"),
        "full_determinism": ((False, None), "deterministic kernels are not traced"),
        "num_processes": ((None, 1), _RANKS),
        "num_machines": ((None, 1), _RANKS),
    }
)


_BOOLS: Mapping[str, bool] = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}
_STORAGES = ("uint8", "int8", "bfloat16", "float16", "float32", "float64")  # of bitsandbytes, for packed weights
_KINDS: Mapping[Any, str] = MappingProxyType(
    {bool: "True or False", int: "an integer", float: "a number", str: "a word", str | None: "a word or null"}
)


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """How the model is loaded and adapted.

    Attributes:
        dtype: of weights; None: float32, as TRL's trainers load it, and the config's for transformers' Trainer.
        attn_implementation: None: what transformers chooses.
        lora_target_modules: names of layers, or "all-linear"; None: those that peft chooses for the model.

    Raises:
        InputError: a value is of another type, or bitsandbytes does not know it; or two exclude each other.
    """

    dtype: str | None = None
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: Any = None
    lora_modules_to_save: Any = None
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(ModelKeys).items():
            value = getattr(self, name)
            if kind is not Any and not isinstance(value, kind | int if kind is float else kind):
                raise InputError(f"`{name}` must be {_KINDS[kind]}, but is {quote(value)} instead.")
        if self.load_in_4bit and self.load_in_8bit:
            raise InputError("`load_in_4bit` and `load_in_8bit` cannot both be True.")
        if self.use_dora and self.is_quantized:
            raise InputError("`use_dora` is not planned with weights in 4 or 8 bits.")
        require_one_of("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("nf4", "fp4"))
        require_one_of("bnb_4bit_quant_storage", self.bnb_4bit_quant_storage or "uint8", _STORAGES)

    @property
    def is_quantized(self) -> bool:
        """Whether bitsandbytes packs the weights."""
        return self.load_in_4bit or self.load_in_8bit


@dataclass(frozen=True)
class TrainerClasses:
    """A trainer and the class of its arguments, from the package that has them."""

    package: ModuleType
    trainer: Any
    arguments: Any

    @classmethod
    def named(cls, name: str) -> "TrainerClasses":
        """The trainer of this name in ``TRAINERS``.

        Raises:
            InputError: its package is missing.
        """
        package, trainer, arguments = _CLASSES[name]
        module = imported(package, needed_for=f"{trainer} of {package}")
        return cls(module, getattr(module, trainer), getattr(module, arguments))

    @property
    def title(self) -> str:
        """Its name and release."""
        return f"{self.trainer.__name__} of {self.package.__name__} {self.package.__version__}"


@dataclass(frozen=True)
class Arguments:
    """The class of a trainer's arguments, as far as a plan reads keys: its name, and its fields with their types."""

    title: str
    types: Mapping[str, str]

    @classmethod
    def of(cls, trainer: str) -> "Arguments":
        """Those of a trainer in ``TRAINERS``, read in the source, as importing its package takes seconds.

        Raises:
            InputError: there is no such trainer, or its package is missing.
        """
        require_one_of("trainer", trainer, TRAINERS)
        package, _, title = _CLASSES[trainer]
        for name in dict.fromkeys((package, "transformers")):
            if importlib.util.find_spec(name) is None:
                raise missing(name, needed_for=f"{title} of {package}")
        types = _fields_in_source(title)
        return cls(title, types or _types_of_fields(TrainerClasses.named(trainer).arguments))


def _types_of_fields(kind: Any) -> dict[str, str]:
    hints = get_type_hints(kind)  # transformers' parser changes those of the fields
    return {one.name: inspect.formatannotation(hints[one.name]) for one in fields(kind)}


def _fields_in_source(title: str) -> dict[str, str]:
    """The fields of a class of ``_SOURCES`` and of its bases; none if one of them is defined elsewhere."""
    classes: dict[str, ast.ClassDef] = {}
    for package, files in _SOURCES.items():
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in (Path(folder) / file for file in files):
                tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
                classes |= {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
    found, names = dict[str, str](), [title]
    for name in names:
        if name not in classes:
            return {}
        names += [ast.unparse(base) for base in classes[name].bases]
        own = [one for one in classes[name].body if isinstance(one, ast.AnnAssign)]
        found = {ast.unparse(one.target): ast.unparse(one.annotation) for one in own} | found
    return {name: kind for name, kind in found.items() if not name.startswith("_")}


def _converted(key: str, value: Any, annotation: str) -> Any:
    """The value, but for a text the value that transformers' parser of arguments reads in it for a field of this type.

    Raises:
        InputError: it reads none, or the value is of another type.
    """
    kinds = set(re.findall(r"\w+", annotation))
    wanted = next((_KINDS[kind] for kind in (bool, int, float) if kind.__name__ in kinds), "a mapping of keys")
    if not isinstance(value, str):
        fits = {"bool": value in (True, False), "int": as_integer(value) is not None, "float": is_number(value)}
        fits["None"] = value is None  # which many fields take that do not say so
        plain = {"None", *kinds} - {"Optional", "Union"}
        if kinds and plain <= fits.keys() and not any(fits[kind] for kind in plain):
            raise InputError(f"`{key}` must be {wanted}, but is {quote(value)} instead.")
        return value
    try:
        if "dict" in kinds:
            return json.loads(value, object_hook=_with_bools) if value.startswith("{") else value
        if not kinds & {"str", "list"}:
            for kind in (bool, int, float):
                if kind.__name__ in kinds:
                    return _BOOLS[value.lower()] if kind is bool else kind(value)
    except (ValueError, KeyError) as error:
        raise InputError(f"`{key}` must be {wanted}, but is {quote(value)} instead.") from error
    return value


def _with_bools(mapping: dict[str, Any]) -> dict[str, Any]:
    """A mapping that was a text, with True and False for these words, as transformers reads it."""
    words = {"true": True, "false": False}
    return {key: words.get(value.lower(), value) if isinstance(value, str) else value for key, value in mapping.items()}


@dataclass(frozen=True)
class RunKeys:
    """Keys of a run by what they configure.

    Attributes:
        model: how the model is loaded and adapted.
        training: the trainer's arguments.
    """

    model: ModelKeys
    training: Mapping[str, Any]

    @classmethod
    def of(cls, keys: Mapping[str, Any], arguments: Arguments) -> "RunKeys":
        """Sort keys by what they configure: the model, or the trainer by its ``arguments``.

        Raises:
            InputError: a key is unknown, or what it says is not planned.
        """
        of_model = _types_of_fields(ModelKeys)
        types = {**arguments.types, **of_model}
        keys = {key: _converted(key, value, types.get(key, "")) for key, value in keys.items()}
        known = {*types, *_OF_A_SCRIPT, *_NOT_PLANNED}
        for key, value in keys.items():
            if key not in known:
                meant = {name: name for name in known if "eval" not in name}  # which changes nothing in a plan
                hint = did_you_mean(key, {**meant, **_MEANT})
                raise InputError(f"{quote(key)} is no key of {arguments.title} or of TRL's ModelConfig{hint}")
            values, why = _NOT_PLANNED.get(key, ((value,), ""))
            if value not in values:
                raise InputError(f"`{key}={value}` is not planned: {why}.")
            if key in _MAPPINGS and not isinstance(value, dict | None):
                raise InputError(f"`{key}` must be a mapping of keys, but is {quote(value)} instead.")
            if key.endswith("_checkpointing_kwargs") and (value or {}).get("offload"):
                raise InputError(f"`{key}.offload` is not planned; `activation_offloading` of TRL is.")
        loaded = keys.get("model_init_kwargs") or {}
        if loaded.get("quantization_config"):
            raise InputError(
                "`model_init_kwargs.quantization_config` is not planned; `load_in_4bit` and `load_in_8bit` are."
            )
        for key, value in loaded.items():
            if key not in _OF_LOADING and value is not None:
                raise InputError(
                    f"`model_init_kwargs.{key}={value}` is not planned: of these keys a plan reads dtype and"
                    " attn_implementation."
                )
        given: dict[str, Any] = {"dtype": loaded.get("dtype", loaded.get("torch_dtype"))}
        given["attn_implementation"] = loaded.get("attn_implementation")
        model = ModelKeys(**given | {key: value for key, value in keys.items() if key in of_model})
        training = {key: value for key, value in keys.items() if key in arguments.types and key not in _NOT_PLANNED}
        return cls(model, training)


def read_keys(path: Path | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The keys of a JSON or YAML file, and those of ``key=value`` which take their place. Dots name keys of mappings.

    Raises:
        InputError: the file cannot be read, or it or an override has no keys.
    """
    yaml = imported("yaml", needed_for="a Hugging Face model", package="pyyaml")
    keys: dict[str, Any] = {}
    if path is not None:
        unreadable = (OSError, RecursionError, UnicodeDecodeError, yaml.YAMLError)
        with refused(f"`--training-args` {quote(str(path))} cannot be read", *unreadable):
            read = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(read, dict):
            raise InputError(f"`--training-args` must name a file of keys and values, but {quote(str(path))} has none.")
        keys |= {str(key): value for key, value in read.items()}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not key or not equals:
            raise InputError(f"Keys of a run are given as key=value, not as {quote(override)}.")
        *outer, last = key.split(".")
        place = keys
        for name in outer:
            inner = place.get(name) or {}
            if not isinstance(inner, dict):
                raise InputError(f"{quote(override)} names a key of `{name}`, which is {quote(inner)} and no mapping.")
            place[name] = dict(inner)
            place = place[name]
        with refused(f"The value of {quote(override)} cannot be read", yaml.YAMLError):
            place[last] = yaml.safe_load(text)
    return keys


@contextmanager
def refused(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Context: errors of these types become an ``InputError`` that says ``what`` is refused, and the reason."""
    try:
        yield
    except InputError:
        raise
    except errors as error:
        raise InputError(f"{what}: {reason_of(error)}.") from error


def imported(name: str, *, needed_for: str, package: str = "") -> Any:
    """A module of ``package``, which by default has the module's name.

    Raises:
        InputError: the package is missing, or the module cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        found, _, _ = name.partition(".")
        if importlib.util.find_spec(found) is None:
            raise missing(package or found, needed_for=needed_for) from error
        raise InputError(
            f"{quote(name)}, which a plan of {needed_for} needs, cannot be imported: {reason_of(error)}."
        ) from error


def missing(package: str, *, needed_for: str) -> InputError:
    """The error that this package is missing."""
    return InputError(f"A plan of {needed_for} needs {package}: `pip install {package}` installs it.")

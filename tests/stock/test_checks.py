"""What is refused of a config before its recipe is set up, and what torchtune's own set-up refuses."""

import importlib
import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune.modules.model_fusion import DeepFusionModel, EarlyFusionModel

from tests.support.recipe_runs import SHALLOW, adaptive_recipe, shallow_assets, tiny_config
from tests.support.toys import without_torchvision
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.launch import check_first, filter_messages
from torchtune_adaptive.schedule import geometric
from torchtune_adaptive.settings import AdaptiveSettings, named_by_path
from torchtune_adaptive.stock.checks import (
    check_components,
    check_device,
    check_input_files,
    check_model,
    check_models,
    check_options,
    check_run,
    check_top_level_keys,
    why_unrecoverable,
)
from torchtune_adaptive.stock.installed import config_dir, recipe_dir
from torchtune_adaptive.training.batch.noise_scale import gradient_noise_scale

STOCK_CONFIGS = sorted((recipe_dir() / "configs").rglob("*.yaml"))
CONFIGS = [*STOCK_CONFIGS, *sorted(config_dir().rglob("*.yaml"))]


def refusal(check: Any, content: dict[str, Any]) -> str:
    with pytest.raises(InputError) as refused:
        check(OmegaConf.create(content))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def every_config() -> list[DictConfig]:
    configs = [OmegaConf.load(path) for path in CONFIGS]
    return [cfg for cfg in configs if isinstance(cfg, DictConfig)]


# ---- without torch


def test_what_is_checked_first_needs_no_torch() -> None:
    code = "import sys, torchtune_adaptive.launch, torchtune_adaptive.cli.main; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_rank_of_one_node_refuses_a_value_before_it_imports_torch(
    nodes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On several nodes the launch refuses it, which notifies the others."""
    monkeypatch.setattr("sys.argv", ["recipe", "--config", "tiny/full", "adaptive.margin=2"])
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    monkeypatch.setenv("WORLD_SIZE", "1")
    if nodes == "2":
        check_first()
        return
    with pytest.raises(SystemExit) as end:
        check_first()
    assert end.value.code == 1
    assert capsys.readouterr().err == "recipe: `adaptive.margin` must be in [0, 1), but is 2 instead.\n"


def test_help_is_left_to_torchtune() -> None:
    check_run(["--config", "tiny/full", "--help"], ranks=1)


def test_a_key_of_ours_is_named_by_its_path_in_the_config() -> None:
    class OwnError(InputError): ...

    with pytest.raises(OwnError) as refused, named_by_path(), named_by_path():
        raise OwnError("`seq_len` must be 1 with `batch_size`, but is `adaptive.seq_len` or tokenizer.seq_len.")
    assert str(refused.value) == (
        "`adaptive.seq_len` must be 1 with `batch_size`, but is `adaptive.seq_len` or tokenizer.seq_len."
    )


# ---- keys


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("Epochs", "epochs"),
        ("gradient_accumulation_step", "gradient_accumulation_steps"),
        ("batch-size", "batch_size"),
        ("optimiser", "optimizer"),
        ("cudnn_determinstic_mode", "cudnn_deterministic_mode"),  # which only recipes name, and no config
    ],
)
def test_a_misspelt_key_is_refused_with_what_is_meant(key: str, meant: str) -> None:
    sentence = f"A top-level key must be one that the recipe reads, but is '{key}' instead; did you mean `{meant}`?"
    assert refusal(check_top_level_keys, {key: 1}) == sentence


@pytest.mark.parametrize("key", ["my_dir", "run_name", "seq_len", "max_seq_len", "batch_size_val", "eval_dataset"])
def test_a_key_of_the_users_own_passes(key: str) -> None:
    check_top_level_keys(OmegaConf.create({key: 1}))


@pytest.mark.parametrize("use", ["${epoch}", "a/${epoch}/b", "${oc.decode:${epoch}}", "${..epoch}", "${epoch.sub}"])
def test_a_key_that_the_config_interpolates_passes(use: str) -> None:
    check_top_level_keys(OmegaConf.create({"epoch": 3, "tokenizer": {"path": use}}))


# ---- files


def test_a_file_that_is_missing_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    block = {"_component_": "torchtune.training.FullModelTorchTuneCheckpointer", "checkpoint_dir": str(tmp_path)}
    block |= {"checkpoint_files": ["model.pt"], "output_dir": "/no/such", "recipe_checkpoint": None}
    check_input_files(OmegaConf.create({"teacher_checkpointer": block}))
    missing = {"teacher_checkpointer": block | {"checkpoint_dir": "/no/such"}}
    sentence = "`teacher_checkpointer.checkpoint_dir` must exist, but is '/no/such' instead."
    assert refusal(check_input_files, missing) == sentence
    assert refusal(check_input_files, {"checkpointer": block | {"checkpoint_files": ["model.pt", "b.pt"]}}) == (
        f"`checkpointer.checkpoint_files` must be files of '{tmp_path}', but 'b.pt' is not one."
    )
    tokenizer = {"_component_": "torchtune.models.qwen2.qwen2_tokenizer", "path": str(tmp_path), "merges_file": "/x/y"}
    sentence = "`tokenizer.merges_file` must exist, but is '/x/y' instead."
    assert refusal(check_input_files, {"tokenizer": tokenizer, "resume_from_checkpoint": True}) == sentence
    # A run that resumes need not have the files that the first run began with.
    check_input_files(OmegaConf.create(missing | {"resume_from_checkpoint": True}))
    # The reference of LoRA DPO is its own model without adapters, whose files no key names.
    reference = {"ref_checkpointer": block | {"checkpoint_dir": "/no/such"}}
    check_input_files(OmegaConf.create(reference | {"model": {"lora_attn_modules": ["q_proj"]}}))
    assert "`ref_checkpointer.checkpoint_dir` must" in refusal(check_input_files, reference)
    # The user's own component may read a name on a hub, and a data set's source may be one.
    own = {"tokenizer": {"_component_": "my.tokenizer", "path": "hub/name"}, "dataset": {"source": "hub/name"}}
    check_input_files(OmegaConf.create(own))


@pytest.mark.slow
def test_the_rule_for_paths_finds_every_local_path_of_the_stock_configs() -> None:
    """Each of their inputs is below /tmp, and none is on this machine."""
    blocks = 0
    for cfg in every_config():
        for name, block in cfg.items():
            is_read = str(name).endswith(("tokenizer", "checkpointer")) and "_component_" in (block or {})
            paths = [key for key in block if str(block[key]).startswith("/tmp/")] if is_read else []
            for path in {*paths} - {"output_dir"}:
                blocks += 1
                others = {key: block[key] for key in block if key not in paths or key == path}
                others = {key: f"{value}_" if key == path else value for key, value in others.items()}
                assert f"`{name}.{path}` must exist" in refusal(check_input_files, {str(name): others})
    assert blocks > 200


# ---- the device


@pytest.mark.parametrize("device", ["cuda", "xpu:0", "meta"])
def test_a_device_of_a_kind_that_this_machine_lacks_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    kind = "CUDA" if device == "cuda" else device.partition(":")[0]
    assert refusal(check_device, {"device": device}) == (
        f"`device` must be cpu or one that this machine has, but is {device!r} and torch sees no {kind} device."
    )


def test_more_devices_than_this_machine_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for content in ({"device": "cuda"}, {"device": "cuda:1"}, {"device": "cpu"}, {"device": None}, {}):
        check_device(OmegaConf.create(content))
    sentence = "`device` must be one of the 2 that this machine has, but is 'cuda:7' instead."
    assert refusal(check_device, {"device": "cuda:7"}) == sentence
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    sentence = "`--nproc_per_node` must be at most 2, the CUDA devices of this machine, but is 3 instead."
    assert refusal(check_device, {"device": "cuda"}) == sentence


@pytest.mark.parametrize("device", ["gpu", 3.5, ""])
def test_a_device_that_torch_does_not_know_is_refused(device: Any) -> None:
    sentence = f"`device` must be one that torch knows, as cpu or cuda, but is {device!r} instead."
    assert refusal(check_device, {"device": device}) == sentence


# ---- components and their values

ADAMW = "torch.optim.AdamW"


class OfUser:
    """A component whose annotations cannot be evaluated."""

    def __init__(self, size: "NoSuchType", ratio=0.5, mode=0, **others) -> None: ...  # noqa: F821  # pyright: ignore


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ({"_component_": ADAMW, "lr": "fast"}, "`block.lr` must be a number, but is 'fast' instead."),
        ({"_component_": ADAMW, "fused": "yes"}, "`block.fused` must be True or False, but is 'yes' instead."),
        (
            {"_component_": "torchtune.training.get_cosine_schedule_with_warmup", "num_warmup_steps": "x"},
            "`block.num_warmup_steps` must be a number, but is 'x' instead.",
        ),
        (
            {"_component_": "tests.stock.test_checks.OfUser", "ratio": "x"},  # without a readable annotation
            "`block.ratio` must be a number, but is 'x' instead.",
        ),
    ],
)
def test_a_value_that_a_component_does_not_take_is_refused(block: dict[str, Any], sentence: str) -> None:
    assert refusal(check_components, {"block": block}) == sentence


@pytest.mark.parametrize(
    "block",
    [
        {"_component_": ADAMW, "lr": 1e-3, "weight_decay": 0, "fused": None, "betas": [0.9, 0.99]},
        {"_component_": "torch.optim.RAdam", "betas": [0.9, 0.99]},
        {"_component_": "tests.stock.test_checks.OfUser", "size": "x", "mode": "fast", "other": 1},
        {"lr": "fast"},
        {"_component_": "torch.optim.Nonsense", "lr": "fast"},  # which the set-up refuses, as the next
        {"_component_": ADAMW, "weight_decy": 1},
        None,
        3,
    ],
)
def test_a_value_that_a_component_may_take_passes(block: Any) -> None:
    check_components(OmegaConf.create({"block": block}))


def test_a_component_that_needs_torchvision_is_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torchvision(monkeypatch)
    assert refusal(check_components, {"model": {"_component_": "torchtune.models.clip.clip_vision_encoder"}}) == (
        "`model` must be one that can be imported, but 'torchtune.models.clip.clip_vision_encoder' needs torchvision:"
        " `pip install torchvision` provides it."
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The import path:DeprecationWarning")  # torchtune's, of its own phi4
def test_the_keys_and_values_of_every_config_pass() -> None:
    importlib.import_module("tests.support.images")  # which finds torchvision
    configs = every_config()
    assert len(configs) > 150
    for cfg in configs:
        check_top_level_keys(cfg)
        check_components(cfg)


# ---- messages of other libraries


def test_two_messages_that_concern_no_user_are_filtered_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filter_messages()
        for module in ("torchdata.stateful_dataloader", "mine"):
            for text in ("'set_vital' is deprecated, please do not call", "'other' is deprecated"):
                warnings.warn_explicit(text, UserWarning, "file.py", 1, module=module)
    passed = ["'other' is deprecated", "'set_vital' is deprecated, please do not call", "'other' is deprecated"]
    assert [str(one.message) for one in caught] == passed
    log = logging.getLogger("torchao")
    log.warning("Skipping import of cpp extensions due to incompatible torch version 2.13 for torchao version 0.15")
    log.warning("Something else")
    assert caplog.messages == ["Something else"]


# ---- options

SEARCHES: dict[str, Any] = {"use_maximum_batch_size": True}
GROWS: dict[str, Any] = {"batch_increase_function": geometric()}
MEASURES: dict[str, Any] = {"batch_increase_function": gradient_noise_scale()}
IN_BACKWARD = {"optimizer_in_bwd": True}
ON_CPU = {"device": "cpu"}


def check_option(config: dict[str, Any], *, ranks: int = 1, **settings: Any) -> None:
    check_options(OmegaConf.create({"device": "cuda"} | config), AdaptiveSettings(**settings), ranks=ranks)


@pytest.mark.parametrize(
    ("config", "settings", "sentence"),
    [
        (
            {"tensor_parallel_dim": 2},
            MEASURES,
            "`tensor_parallel_dim` must be 1 with a `batch_increase_function` that measures gradients, but is 2",
        ),
        (
            {"compile": True, "tensor_parallel_dim": 2},
            SEARCHES,
            "`compile` must be False for a search with `tensor_parallel_dim` 2, because collectives of compiled code"
            " are not seen, but is True",
        ),
        (
            {"compile": True} | ON_CPU,
            SEARCHES,
            "`compile` must be False for a search on the CPU, where the memory of compiled code cannot be measured,"
            " but is True",
        ),
        (IN_BACKWARD, {"global_batch_size": 8}, "`optimizer_in_bwd` must be False with `global_batch_size` 8, .* True"),
        (IN_BACKWARD, {"max_tokens_per_micro_batch": 512}, ".* with `max_tokens_per_micro_batch` 512, but is True"),
        (IN_BACKWARD, GROWS | {"growth_limit": "none"}, ".* with `growth_limit` none, but is True"),
        (IN_BACKWARD, SEARCHES | {"lr_scaling": "sqrt"}, ".* with `lr_scaling` sqrt, but is True"),
        (
            IN_BACKWARD,
            MEASURES,
            "`optimizer_in_bwd` must be False with a `batch_increase_function` that measures gradients, but is True",
        ),
        (
            {"enable_async_checkpointing": True} | ON_CPU,
            {"ranks": 3},
            "`enable_async_checkpointing` must be False on 3 CPU ranks, whose collectives in the background would mix"
            " with those of training, but is True",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused_only_together(
    config: dict[str, Any], settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError) as refused:
        check_option(config, **settings)
    assert re.fullmatch(f"{sentence} instead.", str(refused.value))
    check_option(config)
    check_option({}, **settings)
    check_option(dict.fromkeys(config.keys() - {"tensor_parallel_dim", "device"}, False), **settings)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (IN_BACKWARD, {"growth_limit": "none", "lr_scaling": "sqrt"}),  # nothing changes the batch
        (ON_CPU | {"compile": True}, GROWS | {"growth_limit": "none"}),  # no search without a limit
    ],
)
def test_a_setting_without_effect_excludes_nothing(config: dict[str, Any], settings: dict[str, Any]) -> None:
    check_option(config, **settings)


NO_TILDE = "must not begin with ~, which only a shell replaces"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"fake_quant_after_n_steps": -1}, "`fake_quant_after_n_steps` must be at least 0, but is -1 instead."),
        ({"gradient_accumulation_steps": 1.5}, "`gradient_accumulation_steps` must be an integer, but is 1.5 instead."),
        ({"gradient_accumulation_steps": -1}, "`gradient_accumulation_steps` must be at least 1, but is -1 instead."),
        ({"max_steps_per_epoch": -1}, "`max_steps_per_epoch` must be at least 1, but is -1 instead."),
        ({"epochs": 0}, "`epochs` must be at least 1, but is 0 instead."),
        ({"batch_size": 0}, "`batch_size` must be at least 1, but is 0 instead."),
        ({"batch_size": "8x"}, "`batch_size` must be an integer, but is '8x' instead."),
        ({"output_dir": "~/x"}, f"`output_dir` {NO_TILDE}, but is '~/x' instead."),
        ({"checkpointer": {"output_dir": "~"}}, f"`checkpointer.output_dir` {NO_TILDE}, but is '~' instead."),
        ({"metric_logger": {"log_dir": "~me/x"}}, f"`metric_logger.log_dir` {NO_TILDE}, but is '~me/x' instead."),
        ({"log_every_n_steps": 0}, "`log_every_n_steps` must be at least 1, but is 0 instead."),
        (
            {"clip_grad_norm": "abc"},
            "`clip_grad_norm` must be a number of at least 0, inf or null, but is 'abc' instead.",
        ),
        ({"clip_grad_norm": -1}, "`clip_grad_norm` must be a number of at least 0, inf or null, but is -1 instead."),
        ({"loss": {"reduction": "sum"}}, "`loss.reduction` must be mean, but is 'sum' instead."),
        ({"loss": {"num_output_chunks": 0}}, "`loss.num_output_chunks` must be at least 1, but is 0 instead."),
        ({"kd_ratio": 1.5}, "`kd_ratio` must be in [0, 1], but is 1.5 instead."),
        ({"kd_ratio": True}, "`kd_ratio` must be in [0, 1], but is True instead."),
        ({"shuffle": [1]}, "`shuffle` must be True or False, but is [1] instead."),
        (
            {"tensor_parallel_dim": 2, "clip_grad_norm": 1.0},
            "`clip_grad_norm` must be null with `tensor_parallel_dim` 2, because torch cannot clip gradients of"
            " different meshes, but is 1.0 instead.",
        ),
        ({"tensor_parallel_dim": "two"}, "`tensor_parallel_dim` must be an integer, but is 'two' instead."),
        ({"optimizer": None}, "`optimizer` must be a mapping, but is None instead."),
        ({"optimizer": [1]}, "`optimizer` must be a mapping, but is [1] instead."),
        ({"loss": [1]}, "`loss` must be a mapping, but is [1] instead."),
        ({"output_dir": None}, "`output_dir` must be a folder, but is None instead."),
        ({"compile": "yes"}, "`compile` must be True or False, but is 'yes' instead."),
        (
            {"optimizer": {"_component_": "no_such_package.optim.PagedAdamW8bit"}},
            "`optimizer` must be of an installed package, but is 'no_such_package.optim.PagedAdamW8bit' instead.",
        ),
        (
            ON_CPU | {"fsdp_cpu_offload": True},
            "`fsdp_cpu_offload` must be False on a CPU, which has no other memory, but is True instead.",
        ),
    ],
)
def test_values_of_stock_keys_are_checked(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        check_option(config)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "config",
    [
        {"compile": True, "device": "cuda:1"},
        IN_BACKWARD,
        {"epochs": 1, "max_steps_per_epoch": None, "clip_grad_norm": "inf", "loss": {"reduction": "mean"}},
        {"clip_grad_norm": 0, "loss": {"num_output_chunks": 1}},
        {"gradient_accumulation_steps": 1, "fake_quant_after_n_steps": None, "kd_ratio": 0, "clip_grad_norm": 1.0},
        {"fake_quant_after_n_steps": 0, "kd_ratio": 1, "compile": None, "shuffle": 1, "clip_grad_norm": float("inf")},
        {"fsdp_cpu_offload": True, "enable_async_checkpointing": True},
        ON_CPU | {"fsdp_cpu_offload": False, "enable_async_checkpointing": True},
        {"optimizer": {"_component_": "tests.support.recipe_runs.adamw_with_tensor_rate"}},
        {"output_dir": "x~", "checkpointer": {"output_dir": "${output_dir}/~"}},
    ],
)
def test_other_options_pass_also_with_a_search(config: dict[str, Any]) -> None:
    check_option(config, **SEARCHES)


def test_an_optimizer_of_a_file_in_the_working_directory_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_optimizers.py").touch()
    config = {"optimizer": {"_component_": "my_optimizers.Mine"}}
    with pytest.raises(InputError, match=r"my_optimizers\.Mine"):
        check_option(config)
    monkeypatch.chdir(tmp_path)
    check_option(config)


def test_a_model_with_images_among_its_tokens_is_trained_but_not_searched() -> None:
    model, searches = EarlyFusionModel.__new__(EarlyFusionModel), AdaptiveSettings(use_maximum_batch_size=True)
    with pytest.raises(InputError, match=r"a text model or a DeepFusionModel .*, but is a EarlyFusionModel instead"):
        check_model(model, searches, {})
    check_model(model, AdaptiveSettings(), {})
    for other in (DeepFusionModel.__new__(DeepFusionModel), nn.Linear(1, 1)):
        check_model(other, searches, {})


def test_a_plan_for_tensor_parallelism_must_match_the_model() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)]), "output": nn.Linear(1, 1)})
    check_model(model, AdaptiveSettings(), {"layers.*": None, "output": None})
    with pytest.raises(InputError, match=r"`tensor_parallel_plan` must .* has 'layers\.\*\.mlp', which matches none\."):
        check_model(model, AdaptiveSettings(), {"output": None, "layers.*.mlp": None})


def decoder(*, tokens: int = 8, longest: int = 4) -> nn.Module:
    """A model that knows as many tokens, and takes rows up to that length."""
    model: Any = nn.Module()
    model.tok_embeddings, model.max_seq_len = nn.Embedding(tokens, 1), longest
    return model


def within_another(model: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.decoder = model
    return outer


PAIR = {"rejected_input_ids": [1, 8], "chosen_input_ids": [1]}


@pytest.mark.parametrize(
    ("models", "row", "sentence"),
    [
        (
            [decoder(), decoder(tokens=9)],
            {"tokens": [1]},
            "`teacher_model` must have the vocabulary of `model` (8 tokens), but has 9 instead.",
        ),
        (
            [decoder()],
            {"tokens": [7, 8, 9]},
            "`tokenizer` must give tokens below 8, the vocabulary of `model`, but gives 8 in the first sample of"
            " `dataset`.",
        ),
        (
            [within_another(decoder())],
            PAIR,
            "`tokenizer` must give tokens below 8, the vocabulary of `model`, but gives 8 in the first sample of"
            " `dataset`.",
        ),
        (
            [decoder()],
            {"tokens": torch.tensor([0, -1])},
            "`tokenizer` must give tokens below 8, the vocabulary of `model`, but gives -1 in the first sample of"
            " `dataset`.",
        ),
        (
            [decoder(), decoder(longest=2)],
            {"tokens": [1, 2, 3]},
            "`teacher_model` must take the rows of `dataset`, but has a max_seq_len of 2, and the first sample has 3"
            " tokens.",
        ),
    ],
)
def test_models_that_do_not_fit_each_other_or_the_first_sample_are_refused(
    models: list[nn.Module], row: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError) as refused:
        check_models(models, [row])
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "models", [[decoder()], [decoder(longest=9), decoder()], [nn.Linear(1, 1), decoder()], [nn.Linear(1, 1)]]
)
def test_models_that_fit_or_whose_sizes_are_not_known_pass(models: list[nn.Module]) -> None:
    for row in ({"tokens": [0, 7, 7, 7]}, PAIR | {"rejected_input_ids": [7]}, {"text": "x"}):
        check_models(models, [row, {"tokens": [99]}])  # only the first sample is read


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"device": "cuda:3", "optimizer_in_bwd": False, "tensor_parallel_dim": 1}, ""),
        (
            {"device": "cuda", "optimizer_in_bwd": True},
            "with `optimizer_in_bwd` parameters change before the ranks can agree on a step",
        ),
        (
            {"device": "cuda", "tensor_parallel_dim": 2, "compile": True},
            "with `compile` and `tensor_parallel_dim` above 1 collectives of compiled code are not seen",
        ),
        ({"device": "cuda", "tensor_parallel_dim": 2}, ""),
        ({"device": "xpu:0"}, "it supports the CPU and CUDA, not `device` xpu:0"),
    ],
)
def test_the_reason_why_a_config_cannot_recover_is_named(config: dict[str, Any], reason: str) -> None:
    assert why_unrecoverable(OmegaConf.create(config)) == reason


# ---- what torchtune's set-up refuses, so that no check of ours is needed

IN_SET_UP = {
    "seed=x": "TypeError",
    "model=x": "instantiate only supports DictConfigs, got <class 'str'>",
    "enable_activation_offloading=True": "enable_activation_offloading should only be True when training on CUDA",
    "optimizer._component_=torch.optim.Nonsense": "Error loading 'torch.optim.Nonsense'",
    "optimizer.weight_decy=1": "unexpected keyword argument 'weight_decy'",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
@pytest.mark.parametrize("override", IN_SET_UP)
def test_torchtunes_set_up_refuses_a_value_before_training(override: str, tiny_dir: Path, tmp_path: Path) -> None:
    cfg = tiny_config("full_single", shallow_assets(tiny_dir), tmp_path, **SHALLOW, device="cpu")
    cfg: Any = OmegaConf.merge(cfg, OmegaConf.from_dotlist([override]))
    with pytest.raises(InputError) as refused:
        adaptive_recipe("full_single")(cfg=cfg).setup(cfg=cfg)
    assert IN_SET_UP[override] in str(refused.value)
    assert "\n" not in str(refused.value)

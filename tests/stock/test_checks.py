"""What is refused of a config before its recipe is set up."""

import logging
import math
import subprocess
import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torchtune.modules.model_fusion import DeepFusionModel, EarlyFusionModel

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.launch import check_first
from torchtune_adaptive.output import filter_messages
from torchtune_adaptive.schedule import geometric, gradient_noise_scale
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.checks import (
    check_components,
    check_device,
    check_model,
    check_models,
    check_options,
    check_run,
    check_top_level_keys,
    why_unrecoverable,
)


def refusal(check: Any, *given: Any) -> str:
    with pytest.raises(InputError) as refused:
        check(*given)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---- without torch


def test_what_is_checked_first_needs_no_torch() -> None:
    code = "import sys, torchtune_adaptive.launch, torchtune_adaptive.cli.commands; print('torch' in sys.modules)"
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


# ---- keys


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimiser", "optimizer"),
        ("batch-size", "batch_size"),
        ("cudnn_determinstic_mode", "cudnn_deterministic_mode"),  # which only recipes name, and no config
        ("Use-Maximum_Batch_Size", "use_maximum_batch_size"),
        ("maximise_batch_size", "use_maximum_batch_size"),
        ("batch_increase_fn", "batch_increase_function"),
        ("adaptve", "adaptive"),
        ("max-batch-size", "adaptive.max_batch_size"),
    ],
)
def test_a_misspelt_or_misplaced_key_is_refused_with_what_is_meant(key: str, meant: str) -> None:
    sentence = f"No recipe reads the top-level key '{key}'; did you mean `{meant}`?"
    assert refusal(check_top_level_keys, OmegaConf.create({key: 1})) == sentence
    check_top_level_keys(OmegaConf.create({key: 1, "tokenizer": {"path": f"${{{key}}}"}}))  # the user's own


def test_a_misspelt_block_needs_less_likeness() -> None:
    sentence = "No recipe reads the top-level key 'modle'; did you mean `model`?"
    assert refusal(check_top_level_keys, OmegaConf.create({"modle": {"lora_rank": 4}})) == sentence
    check_top_level_keys(OmegaConf.create({"modle": 4, "val_dataset": {"split": "test"}}))


def test_keys_of_the_users_own_pass() -> None:
    keys = ("adapter", "adaptive_lr", "run_name", "max_seq_len", "batch_size_val", 3)
    check_top_level_keys(OmegaConf.create(dict.fromkeys(keys, 1)))


@pytest.mark.parametrize("use", ["a/${epoch}/b", "${oc.decode:${epoch}}", "${..epoch}", "${epoch.sub}"])
def test_a_key_that_the_config_interpolates_passes(use: str) -> None:
    check_top_level_keys(OmegaConf.create({"epoch": 3, "tokenizer": {"path": use}}))


# ---- the device


@pytest.mark.parametrize(
    ("device", "local_ranks", "sentence"),
    [
        *((device, 2, "") for device in ("cuda", "cuda:1", "cpu", None)),
        ("cpu", 3, ""),
        ("cuda:7", 1, "`device` must be cpu or one of this machine, but is 'cuda:7' instead; torch sees 2."),
        *(
            (device, 1, f"`device` must be cpu or one of this machine, but is {device!r} instead; torch sees 0.")
            for device in ("xpu:0", "gpu", 3.5)
        ),
        ("cuda", 3, "`--nproc_per_node` must be at most 2, the number of cuda devices, but is 3 instead."),
    ],
)
def test_a_device_that_this_machine_lacks_is_refused(
    device: Any, local_ranks: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    cfg = OmegaConf.create({"device": device})
    if sentence:
        assert refusal(check_device, cfg) == sentence
    else:
        check_device(cfg)


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
            {"_component_": "tests.stock.test_checks.OfUser", "ratio": "x"},  # without a readable annotation
            "`block.ratio` must be a number, but is 'x' instead.",
        ),
    ],
)
def test_a_value_that_a_component_does_not_take_is_refused(block: dict[str, Any], sentence: str) -> None:
    assert refusal(check_components, OmegaConf.create({"block": block})) == sentence


@pytest.mark.parametrize(
    "block",
    [
        {"_component_": ADAMW, "lr": 1e-3, "weight_decay": 0, "fused": None, "betas": [0.9, 0.99]},
        {"_component_": "tests.stock.test_checks.OfUser", "size": "x", "mode": "fast", "other": 1},
        {"_component_": "torch.optim.Nonsense", "lr": "fast"},  # which the set-up refuses
        3,
    ],
)
def test_a_value_that_a_component_may_take_passes(block: Any) -> None:
    check_components(OmegaConf.create({"block": block}))


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
EXCLUDED = "`optimizer_in_bwd: True` cannot be combined with"


def check_option(config: Any, *, ranks: int = 1, **settings: Any) -> None:
    check_options(OmegaConf.create({"device": "cuda", **config}), AdaptiveSettings(**settings), ranks=ranks)


@pytest.mark.parametrize(
    ("config", "settings", "sentence"),
    [
        (
            {"tensor_parallel_dim": 2},
            MEASURES,
            "`tensor_parallel_dim: 2` cannot be combined with a `batch_increase_function` that measures gradients.",
        ),
        (
            {"tensor_parallel_dim": 2, "clip_grad_norm": 1.0},
            {},
            "`tensor_parallel_dim: 2` cannot be combined with `clip_grad_norm: 1.0`: torch cannot clip gradients of"
            " different meshes.",
        ),
        (
            {"compile": True, "tensor_parallel_dim": 2},
            SEARCHES,
            "A search cannot see the collectives of compiled code, so that `compile: True` cannot be combined with"
            " `tensor_parallel_dim: 2`.",
        ),
        (
            {"compile": True} | ON_CPU,
            SEARCHES,
            "A search on the CPU cannot measure the memory of compiled code: it needs `compile: False`.",
        ),
        (IN_BACKWARD, {"global_batch_size": 8}, f"{EXCLUDED} `global_batch_size: 8`."),
        (IN_BACKWARD, GROWS | {"growth_limit": "none"}, f"{EXCLUDED} `growth_limit: none`."),
        (IN_BACKWARD, SEARCHES | {"lr_scaling": "sqrt"}, f"{EXCLUDED} `lr_scaling: sqrt`."),
        (IN_BACKWARD, MEASURES, f"{EXCLUDED} a `batch_increase_function` that measures gradients."),
        (
            {"enable_async_checkpointing": True} | ON_CPU,
            {"ranks": 3},
            "`enable_async_checkpointing: True` needs a GPU or one rank: on 3 CPU ranks its collectives would mix with"
            " those of training.",
        ),
        ({"fsdp_cpu_offload": True} | ON_CPU, {}, "`fsdp_cpu_offload: True` needs a GPU."),
    ],
)
def test_options_that_exclude_each_other_are_refused_only_together(
    config: dict[str, Any], settings: dict[str, Any], sentence: str
) -> None:
    assert refusal(partial(check_option, **settings), config) == sentence
    check_option({}, **settings)
    for name in config:
        check_option({key: value for key, value in config.items() if key != name}, **settings)
    if settings:
        check_option(config)


INTEGERS = {"gradient_accumulation_steps": 1, "max_steps_per_epoch": 1, "epochs": 1, "log_every_n_steps": 1}
INTEGERS |= {"tensor_parallel_dim": 1, "fake_quant_after_n_steps": 0, "loss.num_output_chunks": 1}
INTEGERS |= {"tokenizer.max_seq_len": 2, "model.lora_rank": 1, "batch_size": 1}
FLAGS = ("compile", "enable_activation_checkpointing", "enable_activation_offloading", "optimizer_in_bwd", "shuffle")
FLAGS += ("enable_async_checkpointing", "fsdp_cpu_offload", "log_peak_memory_stats", "save_adapter_weights_only")
NO_TILDE = "must not begin with ~, which only a shell replaces"


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        *((key, least - 1, f"must be at least {least}, but is {least - 1}") for key, least in INTEGERS.items()),
        *(("batch_size", value, f"must be an integer, but is {value!r}") for value in ("4", 1.0)),
        *((key, "yes", "must be True or False, but is 'yes'") for key in FLAGS),
        ("optimizer", [1], "must be a mapping, but is [1]"),
        ("output_dir", None, "must be a folder, but is None"),
        *((key, "~/x", f"{NO_TILDE}, but is '~/x'") for key in ("output_dir", "checkpointer.output_dir")),
        ("metric_logger.log_dir", "~me", f"{NO_TILDE}, but is '~me'"),
        *(
            ("clip_grad_norm", value, f"must be a number of at least 0, inf or null, but is {value!r}")
            for value in ("abc", -1, float("nan"))
        ),
        *(("optimizer.lr", value, f"must be a finite number, but is {value}") for value in (math.inf, math.nan)),
        ("loss.reduction", "sum", "must be mean, but is 'sum'"),
        ("loss.num_output_chunks", None, "must be an integer, but is None"),
        *(("kd_ratio", value, f"must be in [0, 1], but is {value!r}") for value in (1.5, True, None)),
    ],
)
def test_values_of_stock_keys_are_checked(key: str, value: object, sentence: str) -> None:
    cfg = OmegaConf.create()
    OmegaConf.update(cfg, key, value)
    assert refusal(check_option, cfg) == f"`{key}` {sentence} instead."


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (IN_BACKWARD, SEARCHES),
        (IN_BACKWARD, {"growth_limit": "none", "lr_scaling": "sqrt"}),  # nothing changes the batch
        ({"compile": True}, SEARCHES),
        (ON_CPU | {"compile": True}, GROWS | {"growth_limit": "none"}),  # no search without a limit
        ({"fsdp_cpu_offload": True, "enable_async_checkpointing": True}, {"ranks": 3}),
        ({"max_steps_per_epoch": None, "clip_grad_norm": "inf", "kd_ratio": 0, "compile": None}, {}),
        ({"fake_quant_after_n_steps": None, "clip_grad_norm": float("inf"), "kd_ratio": 1, "shuffle": 1}, {}),
        ({"clip_grad_norm": 0, "loss": {"reduction": "mean", "num_output_chunks": 1}}, {}),
        ({key: least for key, least in INTEGERS.items() if "." not in key}, {}),
        ({"output_dir": "x~", "checkpointer": {"output_dir": "${output_dir}/~"}}, {}),
    ],
)
def test_options_without_a_conflict_pass(config: dict[str, Any], settings: dict[str, Any]) -> None:
    check_option(config, **settings)


def test_a_model_with_images_among_its_tokens_is_trained_but_not_searched() -> None:
    model, searches = EarlyFusionModel.__new__(EarlyFusionModel), AdaptiveSettings(use_maximum_batch_size=True)
    sentence = "A search does not support a `model` of type EarlyFusionModel."
    assert refusal(check_model, model, searches, {}) == sentence
    check_model(model, AdaptiveSettings(), {})
    for other in (DeepFusionModel.__new__(DeepFusionModel), nn.Linear(1, 1)):
        check_model(other, searches, {})


def test_a_plan_for_tensor_parallelism_must_match_the_model() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)]), "output": nn.Linear(1, 1)})
    check_model(model, AdaptiveSettings(), {"layers.*": None, "output": None})
    with pytest.raises(InputError, match=r"`tensor_parallel_plan` has 'layers\.\*\.mlp', which no module .*"):
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
    ("models", "row", "found"),
    [
        ([decoder()], {"tokens": [7, 8, 9]}, "token 8, but `model` has a vocabulary of 8 tokens"),
        ([within_another(decoder())], PAIR, "token 8, but `model` has a vocabulary of 8 tokens"),
        ([decoder()], {"tokens": torch.tensor([0, -1])}, "token -1, but `model` has a vocabulary of 8 tokens"),
        ([decoder(), decoder(longest=2)], {"tokens": [1] * 3}, "3 tokens, but `teacher_model` a max_seq_len of 2"),
    ],
)
def test_models_that_do_not_take_the_first_sample_are_refused(models: Any, row: dict[str, Any], found: str) -> None:
    assert refusal(check_models, models, [row]) == f"The first sample of `dataset` has {found}."


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    said = refusal(check_models, [decoder(), decoder(tokens=9)], [{"tokens": [1]}])
    assert said == "`teacher_model` needs the vocabulary of `model` (8 tokens), but has 9."


@pytest.mark.parametrize("models", [[decoder(longest=9), decoder()], [nn.Linear(1, 1), decoder()]])
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

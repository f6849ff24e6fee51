"""What cannot be searched or trained with, said in one sentence before any training. Nothing here communicates."""

from typing import Any

import torch
from omegaconf import DictConfig

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.memory.meter import device_memory_bytes
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.text import format_bytes
from torchtune_adaptive.worst_case import is_packed


def refuse_unsearchable(cfg: DictConfig) -> None:
    """Refuse a recipe's options with which a search could not measure a step, or not undo it.

    Raises:
        InputError: optimizer in backward, tensor parallelism, or compiled code on the CPU.
    """
    if cfg.get("optimizer_in_bwd", False):
        raise InputError(
            "`optimizer_in_bwd` must be False for a search of the batch size, but is True instead;"
            " with optimizer_in_bwd=False an 8-bit optimizer such as torchao.optim.AdamW8bit saves memory too."
        )
    tensor_parallel_dim = cfg.get("tensor_parallel_dim", 1)
    if tensor_parallel_dim > 1:
        raise InputError(
            f"`tensor_parallel_dim` must be 1 for a search of the batch size, but is {tensor_parallel_dim} instead."
        )
    if cfg.get("compile", False) and str(cfg.device).startswith("cpu"):
        raise InputError(
            "`compile` must be False for a search on the CPU, where the memory of compiled code cannot be metered,"
            " but is True instead."
        )


def why_unrecoverable(cfg: DictConfig) -> str:
    """Why training with these options cannot take up again after out of memory, in a sentence's part; "" if it can."""
    if cfg.get("optimizer_in_bwd", False):
        return "with `optimizer_in_bwd` parameters change before the ranks can agree on a step"
    if cfg.get("tensor_parallel_dim", 1) > 1:
        return "with `tensor_parallel_dim` above 1 collectives depend on the batch"
    if str(cfg.device).partition(":")[0] not in ("cpu", "cuda"):
        return f"it is built for the CPU and CUDA, not for `device` {cfg.device}"
    return ""


def refuse_stepping_in_backward(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """Refuse what needs an optimizer step of its own where each backward is one.

    Raises:
        InputError: optimizer in backward with several micro-steps to a step, or with a rate that scales.
    """
    defaults = AdaptiveSettings()
    for name in ("global_batch_size", "max_tokens_per_micro_batch", "lr_scaling"):
        value = getattr(settings, name)
        if cfg.get("optimizer_in_bwd", False) and value != getattr(defaults, name):
            raise InputError(f"`optimizer_in_bwd` must be False with `{name}` {value}, but is True instead.")


def refuse_async_checkpoints(cfg: DictConfig, *, ranks: int) -> None:
    """Refuse to save in the background on the CPU, where its collectives would get between those of training.

    torchtune gives them the group of training; on a GPU they take its CPU side, of which training makes no use.

    Raises:
        InputError: the config asks for it on several ranks.
    """
    if cfg.get("enable_async_checkpointing", False) and str(cfg.device).startswith("cpu") and ranks > 1:
        raise InputError(
            f"`enable_async_checkpointing` must be False on {ranks} CPU ranks, whose collectives in the background"
            " would get between those of training, but is True instead."
        )


def refuse_packs(dataset: Any) -> None:
    """Refuse packed data where rows are to be grouped by length.

    Raises:
        InputError: ``dataset`` gives packs.
    """
    if is_packed(dataset):
        raise InputError(
            "`dataset.packed` must be False for `max_tokens_per_micro_batch`, because packs are all of one length,"
            " but is True instead."
        )


def refuse_impossible_limit(settings: AdaptiveSettings, device: torch.device) -> None:
    """Refuse a search on a CPU without a limit, and a limit above what the device has.

    Raises:
        InputError: the limit is not one that can be kept.
    """
    limit_bytes, device_bytes = settings.memory_limit_bytes, device_memory_bytes(device)
    if limit_bytes is None and device.type == "cpu":
        raise InputError("`memory_limit` must be given for a search on the CPU, for example 512MiB, but is None.")
    if limit_bytes is not None and limit_bytes > device_bytes:
        raise InputError(
            f"`memory_limit` must be at most what the device has ({format_bytes(device_bytes)}),"
            f" but is {format_bytes(limit_bytes)} ({limit_bytes} bytes) instead."
        )


def refuse_small_data(num_samples: int, *, needed: str) -> None:
    """Refuse a data set that does not fill one optimizer step; ``needed`` says what that is.

    Raises:
        InputError: always; call it when an epoch would have no step.
    """
    raise InputError(f"`dataset` must fill an optimizer step ({needed}), but has {num_samples} samples.")


def refuse_few_samples_per_step(samples_per_step: int, *, ranks: int) -> None:
    """Refuse an optimizer step of which some rank has no sample.

    Raises:
        InputError: there are fewer samples than ranks.
    """
    if samples_per_step < ranks:
        raise InputError(
            f"`global_batch_size` must be at least the number of ranks ({ranks}), but is {samples_per_step} instead."
        )


def refuse_large_start(batch_size: int, largest: int, *, bound: int) -> None:
    """Refuse to train with a ``batch_size`` above the ``largest`` that a search up to ``bound`` found.

    Raises:
        InputError: it is above.
    """
    if batch_size > largest:
        what = "that data set and max_batch_size allow" if largest == bound else "that fits"
        raise InputError(f"`batch_size` must be at most the largest {what} ({largest}), but is {batch_size} instead.")


def refuse_long_rows(seq_len: int, model: torch.nn.Module) -> None:
    """Refuse rows of ``seq_len`` tokens that ``model`` has no positions for.

    Raises:
        InputError: the model says that it takes fewer tokens.
    """
    longest = getattr(model, "max_seq_len", None)
    if longest is not None and seq_len > longest:
        raise InputError(f"Rows must have at most the model's max_seq_len ({longest} tokens), but have {seq_len}.")

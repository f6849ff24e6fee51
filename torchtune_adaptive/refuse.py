"""What cannot be searched or trained with, said in one sentence before any training. Nothing here communicates."""

import torch
from omegaconf import DictConfig

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.meter import device_memory_bytes
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.units import format_bytes


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


def refuse_small_data(num_samples: int, *, batch_size: int, micro_steps: int, ranks: int) -> None:
    """Refuse a data set that does not fill one optimizer step.

    Raises:
        InputError: always; call it when an epoch would have no step.
    """
    raise InputError(
        f"`dataset` must fill an optimizer step ({samples_per_step(batch_size, micro_steps, ranks)}),"
        f" but has {num_samples} samples."
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


def samples_per_step(batch_size: int, micro_steps: int, ranks: int) -> str:
    """The arithmetic of an optimizer step, said aloud.

    >>> samples_per_step(8, 4, 2)
    '8 rows * 4 micro-steps * 2 ranks = 64 samples per optimizer step'
    """
    total = batch_size * micro_steps * ranks
    return f"{batch_size} rows * {micro_steps} micro-steps * {ranks} ranks = {total} samples per optimizer step"

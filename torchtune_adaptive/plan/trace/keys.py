"""Which keys of a config a traced step depends on.

Every key that torchtune's recipes read is in one of these tables, or refused.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.errors import InputError, quote, require_bool
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import resolved

# A trace runs these, or the figures of host memory count them.
TRACED = (
    "ac_mode",
    "ac_option",
    "checkpointer",
    "clip_grad_norm",
    "compile",
    "custom_sharded_layers",
    "dataset",  # only whether it is packed
    "device",
    "dtype",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "gradient_accumulation_steps",  # only whether there are several
    "kd_loss",
    "loss",
    "model",
    "optimizer",
    "optimizer_in_bwd",
    "quantizer",
    "ref_checkpointer",
    "save_adapter_weights_only",
    "teacher_checkpointer",
    "teacher_model",
    "tensor_parallel_dim",
    "tensor_parallel_plan",
)
# The plan reads these itself: they change no step of a given size.
DECIDED = MappingProxyType(
    {
        "batch_size": "each size is planned",
        "enable_async_checkpointing": "host memory",
        "epochs": "host memory: optimizer state is saved in all but the last",
        "tokenizer": "its max_seq_len is the length of the rows",
    }
)
WITHOUT_EFFECT = MappingProxyType(
    {
        "collate_fn": "pads rows to the longest; the planned rows have one length",
        "fake_quant_after_n_steps": "planned are the steps with fake quantization, which need more",
        "kd_ratio": "a factor of the loss",
        "log_every_n_steps": "reads one number",
        "log_peak_memory_stats": "reads what the allocator counts",
        "low_cpu_ram": "host memory is planned without it, which takes more",
        "lr_scheduler": "a number for each group of parameters",
        "max_steps_per_epoch": "how often a step runs",
        "metric_logger": "writes numbers",
        "output_dir": "where files are written",
        "profiler": "its own buffers are not counted",
        "resume_from_checkpoint": "the same tensors, with other values",
        "seed": "other values",
        "shuffle": "the order of the rows",
    }
)
# With another value than null a step would be planned wrongly.
REFUSED = ("cudnn_deterministic_mode",)


def traced_content(cfg: DictConfig) -> dict[str, Any]:
    """The part of ``cfg`` on which a traced step depends.

    Raises:
        InputError: a key has a value with which a step would be planned wrongly.
    """
    content = resolved(cfg)
    _refuse_unplanned(content)
    found = {key: content[key] for key in TRACED if key in content and key != "dataset"}
    found["packed"] = is_packed(content)
    found["max_images"] = max_images(content)
    found["cuts_samples"] = AdaptiveSettings.from_cfg(cfg).cuts_samples  # by which objectives count otherwise
    found["gradient_accumulation_steps"] = min(2, content.get("gradient_accumulation_steps") or 1)
    return found


def is_packed(cfg: Mapping[str, Any]) -> bool:
    """Whether the rows of the config's data set, or of one of its data sets, are packed."""
    dataset = cfg.get("dataset")
    blocks = dataset if isinstance(dataset, Sequence) else [dataset]
    packed = [block.get("packed", False) for block in blocks if isinstance(block, Mapping)]
    for one in packed:
        require_bool("dataset.packed", one)
    return any(packed)


def max_images(content: Mapping[str, Any]) -> int:
    """Images of a planned row, if the model takes images: a plan reads no data set."""
    return (content.get("adaptive") or {}).get("max_images") or 1


def _refuse_unplanned(content: dict[str, Any]) -> None:
    device = content.get("device", "cpu")
    if str(device).partition(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"`device` must be the CPU or CUDA, but is {quote(device)} instead.")
    dim = content.get("tensor_parallel_dim", 1)
    if dim != 1 and content.get("compile", False):
        raise InputError(f"`compile` cannot be planned with `tensor_parallel_dim: {dim}`.")
    mode = content.get("cudnn_deterministic_mode")
    if mode not in (None, 0, "default"):
        raise InputError(f"`cudnn_deterministic_mode: {mode}` cannot be planned: its kernels take other memory.")

"""The trainers whose batches and losses are known, and the arguments with which they cannot recover."""

from typing import Any

from torch import nn

from torchtune_adaptive.errors import InputError

_SAMPLES_ARE_PAIRS = {
    "Trainer": False,
    "Seq2SeqTrainer": False,
    "SFTTrainer": False,
    "DPOTrainer": True,
    "RewardTrainer": True,
}
# Of DPO: they sort samples, or are a mean over tokens, which two samples need not show.
_LOSSES_OVER_WHOLE_BATCHES = ("aot", "aot_unpaired", "sft")


def samples_are_pairs(trainer: type) -> bool:
    """What a trainer declares, or what is known of the first of its bases that is in transformers or TRL."""
    base = next((one for one in trainer.__mro__ if one.__module__.split(".")[0] in ("transformers", "trl")), trainer)
    declared = trainer.samples_are_pairs
    found = _SAMPLES_ARE_PAIRS.get(base.__name__) if declared is None else declared
    if found is None and base.__module__.startswith("trl."):
        raise InputError(f"{base.__name__} is not supported: its batches may be no rows, or its loss may mix them.")
    if found is None:
        raise InputError(
            f"{base.__name__} is not a known trainer: declare its batches by the class attribute `samples_are_pairs`."
        )
    return found


def why_refused(trainer: Any) -> str:
    """Why the trainer's arguments do not allow recovery, or ""."""
    args, accelerator = trainer.args, trainer.accelerator
    processes = accelerator.distributed_type.value
    sharding = getattr(accelerator.state, "fsdp_plugin", None)
    inner_sizes = trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size()
    reasons = {
        "`auto_find_batch_size` must be off, because it changes the batch": args.auto_find_batch_size,
        f"A process must train on one device, but has {args.n_gpu}: start it by `torchrun`": args.n_gpu > 1,
        "A `device_map` must not spread the model over several devices": trainer.is_model_parallel,
        f"Processes must be connected by DistributedDataParallel or FSDP2, not by {processes}": (
            processes in ("DEEPSPEED", "MEGATRON_LM", "XLA")
        ),
        "`fsdp_version` must be 2, but is 1 instead": sharding is not None and sharding.fsdp_version != 2,
        f"Tensor, context and sequence parallelism must be off, but their sizes are {inner_sizes}": any(
            size > 1 for size in inner_sizes
        ),
        "`torch_compile` needs a single process": args.torch_compile and accelerator.num_processes > 1,
        "With several processes, `even_batches` or `dataloader_drop_last` must be on": (
            accelerator.num_processes > 1 and not accelerator.even_batches and not args.dataloader_drop_last
        ),
        "`train_sampling_strategy` 'batch_rebalance' needs a single process: ranks have unequal numbers of samples": (
            accelerator.num_processes > 1 and getattr(args, "train_sampling_strategy", "") == "batch_rebalance"
        ),
        f"`optim` {str(args.optim)!r} steps in the backward pass, which may run again": (
            any(word in str(args.optim).lower() for word in ("lomo", "layerwise"))
        ),
        "`activation_offloading` must be off: what it keeps outlives an error": (
            getattr(args, "activation_offloading", False)
        ),
        "Batches must be of text only, but the model takes images": getattr(trainer, "_is_vlm", False),
    }
    return next((f"{reason}." for reason, applies in reasons.items() if applies), "")


def why_whole(trainer: Any) -> str:
    """Why the trainer's batches must not be cut, by its arguments, as part of a sentence; or ""."""
    found = [one for one in getattr(trainer, "loss_types", ()) if one in _LOSSES_OVER_WHOLE_BATCHES]
    return f"`loss_type` {found} mixes them" if found else ""


def has_own_loss(trainer: Any) -> bool:
    """Whether a user has written the loss, which may then not ignore labels of -100."""
    package = type(trainer).compute_loss.__module__.split(".")[0]
    return package not in ("transformers", "trl") or trainer.compute_loss_func is not None


def check_parameters(model: nn.Module) -> None:
    """Check that transformers averages no gradients in hooks, with collectives that recovery does not know.

    Raises:
        InputError: it does.
    """
    if any(hasattr(one, "_replicated_grad_hook_registered") for one in model.parameters()):
        raise InputError(
            "A model that `DistributedConfig` has sharded cannot have adapters: use DistributedDataParallel."
        )

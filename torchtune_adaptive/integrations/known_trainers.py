"""The trainers whose batches and losses are known, and the arguments with which they cannot recover."""

from typing import Any

from torch import nn

from torchtune_adaptive.errors import InputError, quote

_SAMPLES_ARE_PAIRS = {
    "Trainer": False,
    "Seq2SeqTrainer": False,
    "SFTTrainer": False,
    "DPOTrainer": True,
    "RewardTrainer": True,
}


_LOSSES_OVER_WHOLE_BATCHES = ("aot", "aot_unpaired")  # of DPO: they sort samples, which two samples need not show


def samples_are_pairs(trainer: type) -> bool:
    """What a trainer declares, or what is known of the first of its bases that is in transformers or TRL."""
    base = next((one for one in trainer.__mro__ if one.__module__.split(".")[0] in ("transformers", "trl")), trainer)
    declared = trainer.samples_are_pairs
    found = _SAMPLES_ARE_PAIRS.get(base.__name__) if declared is None else declared
    if found is None:
        raise InputError(
            f"The trainer must be one of {', '.join(_SAMPLES_ARE_PAIRS)}, but is {base.__name__} instead: declare its"
            " batches by the class attribute `samples_are_pairs`."
        )
    return found


def why_refused(trainer: Any) -> str:
    """Why the trainer's arguments do not allow recovery, or ""."""
    args, accelerator = trainer.args, trainer.accelerator
    processes = accelerator.distributed_type.value
    sharding = getattr(accelerator.state, "fsdp_plugin", None)
    inner_sizes = trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size()
    whole = [one for one in getattr(trainer, "loss_types", ()) if one in _LOSSES_OVER_WHOLE_BATCHES]
    reasons = {
        "`auto_find_batch_size` must be False: it restarts training with another batch; `micro_batch_size` is found"
        " instead, and the batch stays": args.auto_find_batch_size,
        f"A process must train on one device, but has {args.n_gpu} instead: start it by `torchrun`": args.n_gpu > 1,
        "The model must be on one device per process, but its `device_map` has several": trainer.is_model_parallel,
        f"Processes must be connected by DistributedDataParallel or FSDP2, but are by {processes} instead": (
            processes in ("DEEPSPEED", "MEGATRON_LM", "XLA")
        ),
        "`fsdp_version` must be 2, but is 1 instead": sharding is not None and sharding.fsdp_version != 2,
        f"Tensor, context and sequence parallelism must be off, but their sizes are {quote(inner_sizes)}": any(
            size > 1 for size in inner_sizes
        ),
        "`fp16` must be False, because its gradient scaler has not been tried: use `bf16`": (
            accelerator.scaler is not None
        ),
        "`torch_compile` must be False with several processes, because it compiles the wrapped model as a whole": (
            args.torch_compile and accelerator.num_processes > 1
        ),
        "With several processes, `even_batches` of `accelerator_config` must be True, but is False instead: a process"
        " with fewer samples would have fewer micro-batches; or set `dataloader_drop_last`": (
            accelerator.num_processes > 1 and not accelerator.even_batches and not args.dataloader_drop_last
        ),
        f"`optim` must not step in the backward pass, which may run again, but is {quote(str(args.optim))}": (
            any(word in str(args.optim).lower() for word in ("lomo", "layerwise"))
        ),
        "`activation_offloading` must be False, because what it keeps cannot be dropped after an error": (
            getattr(args, "activation_offloading", False)
        ),
        "`padding_free` must be False, and `packing_strategy` 'wrapped': documents in one row cannot be cut apart": (
            getattr(trainer, "padding_free", False)
        ),
        "Batches must be of text only, but the model takes images": getattr(trainer, "_is_vlm", False),
        f"`loss_type` must not sort samples, which needs whole batches, but is {quote(whole)}": bool(whole),
    }
    return next((f"{reason}." for reason, applies in reasons.items() if applies), "")


def check_declared(trainer: Any, num_items: Any, factor: float) -> None:
    """Check that ``loss_is_mean_over_samples``, if the trainer's class has it, agrees with what a trial has found.

    Args:
        factor: by how much the loss of both of two samples differs from the sum of each one's.
    Raises:
        InputError: it does not.
    """
    declared = trainer.loss_is_mean_over_samples
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # not in transformers 5.16
    if is_scaled is None:
        is_counted = trainer.model_accepts_loss_kwargs and num_items is not None
        is_scaled = is_counted or trainer.compute_loss_func is not None
    is_mean = factor == (0.5 if is_scaled else 1.0)  # the trainer divides other losses by the batches of a step
    if declared is not None and declared is not is_mean:
        raise InputError(
            f"`loss_is_mean_over_samples` must not be {declared}, because the loss of two samples is"
            f" {'a mean' if is_mean else 'no mean'} of each one's: leave it out, as this is found before training."
        )


def check_parameters(model: nn.Module) -> None:
    """Check that transformers averages no gradients in hooks, with collectives that recovery does not know.

    Raises:
        InputError: it does.
    """
    if any(hasattr(one, "_replicated_grad_hook_registered") for one in model.parameters()):
        raise InputError(
            "Every trained parameter must be sharded, but adapters were added to a model that `DistributedConfig` had"
            " sharded: use DistributedDataParallel."
        )

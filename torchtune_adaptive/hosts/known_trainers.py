"""The trainers whose batches and losses are known, and the arguments with which they cannot recover."""

from typing import Any, NamedTuple

from torch import nn

from torchtune_adaptive.errors import InputError, quote


class Kind(NamedTuple):
    """How a trainer's batches are cut, and whether its loss is a mean over the samples of a batch."""

    samples_are_pairs: bool
    loss_is_mean_over_samples: bool


_KNOWN_TRAINERS = {
    "Trainer": Kind(False, False),
    "Seq2SeqTrainer": Kind(False, False),
    "SFTTrainer": Kind(False, False),
    "DPOTrainer": Kind(True, True),
    "RewardTrainer": Kind(True, True),
}
_LOSSES_OVER_WHOLE_BATCHES = ("aot", "aot_unpaired", "sft")  # of DPO: they sort samples, or are means over tokens


def kind_of(trainer: type) -> Kind:
    """What a trainer declares, or what is known of the first of its bases that is in transformers or TRL."""
    declared = Kind(trainer.samples_are_pairs, trainer.loss_is_mean_over_samples)
    base = next((one for one in trainer.__mro__ if one.__module__.split(".")[0] in ("transformers", "trl")), None)
    known = _KNOWN_TRAINERS.get(base.__name__) if base else None
    if known is None and None in declared:
        raise InputError(
            f"The trainer must be one of {', '.join(_KNOWN_TRAINERS)}, but is"
            f" {base.__name__ if base else trainer.__name__} instead: declare its batches by the class attributes"
            " `samples_are_pairs` and `loss_is_mean_over_samples`."
        )
    return Kind(*(of_base if one is None else one for one, of_base in zip(declared, known or declared, strict=True)))


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
        f"`loss_type` must be a mean over pairs, but {quote(whole)} needs whole batches": bool(whole),
    }
    return next((f"{reason}." for reason, applies in reasons.items() if applies), "")


def is_divided_by_items(trainer: Any, num_items: Any, *, means_over_samples: bool) -> bool:
    """Whether the loss itself is divided by ``num_items``; otherwise it is a mean, which ``Trainer`` divides.

    Raises:
        InputError: the losses of micro-batches do not add up to that of the whole batch.
    """
    is_divided = getattr(trainer, "loss_is_scaled_for_ga", None)  # not in transformers 5.16
    if is_divided is None:
        is_counted = trainer.model_accepts_loss_kwargs and num_items is not None
        is_divided = is_counted or trainer.compute_loss_func is not None
    if not (num_items is not None if is_divided else means_over_samples):
        raise InputError(
            "The loss must be divided by `num_items_in_batch`, or be a mean over samples, which the class attribute"
            f" `loss_is_mean_over_samples = True` declares; but `num_items_in_batch` is {quote(num_items)} here,"
            f" and the attribute is {trainer.loss_is_mean_over_samples}."
        )
    return is_divided


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

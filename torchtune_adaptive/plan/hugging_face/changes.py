"""Changes of a Hugging Face run that need less memory, with what fits after each."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.decide import Plan, PlannedChange
from torchtune_adaptive.plan.hugging_face.run import HuggingFaceRun
from torchtune_adaptive.plan.ways import enough_ranks, first_that_fits, planned_change, shorter_rows

_LORA = {"use_peft": True, "dtype": "bfloat16"}


def ways_to_fit(run: HuggingFaceRun, planned: Plan, plan: Callable[[HuggingFaceRun], Plan]) -> Iterator[PlannedChange]:
    """Plan changes of a run that does not fit, as ``planned``.

    Checkpointing comes first, then weights in bfloat16, adapters, and weights in 4 bits if those are not enough; then
    more ranks and shorter rows. Each change comes on top of checkpointing.

    Args:
        plan: plans a run, with one row as the only requested size.
    """

    def change(name: str, **changes: Any) -> PlannedChange:
        return planned_change(name, lambda: plan(replace(run, **changes)))

    def with_keys(**keys: Any) -> PlannedChange:
        return change(" ".join(f"{key}={value}" for key, value in keys.items()), keys=run.keys | keys)

    has = run.run_keys.model
    if not run.checkpoints:
        run = replace(run, keys=run.keys | {"gradient_checkpointing": True})
        try:
            planned = plan(run)
            yield PlannedChange("gradient_checkpointing=True", planned.decisive)
        except InputError as error:
            yield PlannedChange("gradient_checkpointing=True", None, str(error))
    options: dict[str, Any] = run.run_keys.training.get("gradient_checkpointing_kwargs") or {}
    if has.load_in_8bit and not options.get("use_reentrant"):
        # bitsandbytes' products in 8 bits keep their inputs by themselves, out of the reach of other checkpointing
        keys = run.keys | {"gradient_checkpointing_kwargs": options | {"use_reentrant": True}}
        yield change("gradient_checkpointing_kwargs.use_reentrant=True", keys=keys)
    if not has.use_peft:
        if run.model.dtype.itemsize > 2:
            yield with_keys(dtype="bfloat16")
        adapters = with_keys(**_LORA)
        yield adapters
        if not adapters.fits:
            yield with_keys(**_LORA, load_in_4bit=True)
    elif not has.load_in_4bit:
        yield with_keys(**_LORA, load_in_4bit=True, **({"load_in_8bit": False} if has.load_in_8bit else {}))
    if not has.is_quantized:
        yield from first_that_fits(
            change(f"fsdp=True on {ranks} ranks", ranks=ranks, keys=run.keys | {"fsdp": True})
            for ranks in enough_ranks(planned, is_sharded=bool(run.run_keys.training.get("fsdp")))
        )
    yield from first_that_fits(
        change(f"rows of {seq_len} tokens", seq_len=seq_len, mean_len=run.mean_len and min(run.mean_len, seq_len))
        for seq_len in shorter_rows(planned, run.seq_len)
    )

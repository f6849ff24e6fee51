"""``plan_max_batch_size``: the plan for any PyTorch training loop. It needs torch alone."""

from collections.abc import Iterable, Sequence
from typing import Literal

from torchtune_adaptive.engine.search.options import SearchOptions
from torchtune_adaptive.errors import InputError, quote, require_callable, require_integer, require_one_of
from torchtune_adaptive.plan.decide import BatchSizes, Device, Plan
from torchtune_adaptive.plan.gpu import Card, Overhead
from torchtune_adaptive.plan.show.text import plan_text
from torchtune_adaptive.plan.trace.loop import BuildModel, BuildOptimizer, MakeBatch, TracedLoop, TrainStep, trace_loop


class LoopPlan(Plan):
    """A plan that prints as ``tune-adaptive plan`` does."""

    def __str__(self) -> str:
        return plan_text(self)


_EAGER = "Planned without `torch.compile`, as eager code."


def plan_max_batch_size(
    build_model: BuildModel,
    build_optimizer: BuildOptimizer,
    train_step: TrainStep,
    make_batch: MakeBatch,
    *,
    memory: str | int,
    ranks: int = 1,
    margin: float = SearchOptions.margin,
    batch_sizes: Sequence[int] = (),
    device: Literal["cuda", "cpu"] = "cuda",
    title: str | None = None,
    assumptions: str = "",
) -> LoopPlan:
    """Plan the largest batch size whose train step fits, for any PyTorch training loop, without a GPU or weights.

    The four functions are those of a run, and are called in this process on tensors without memory. The plan prints as
    ``tune-adaptive plan`` does.

    Args:
        build_model: returns the model. It is called on the meta device, and may shard the model by ``fully_shard``.
        build_optimizer: ``build_optimizer(model)`` returns an optimizer of ``torch.optim``, or one whose step runs on
            fake tensors.
        train_step: ``train_step(model, optimizer, batch)`` runs a whole step: forward and backward passes, optimizer
            step. With gradient accumulation it should run two micro-steps. Compiled code runs eagerly.
        make_batch: ``make_batch(n)`` returns a worst-case batch of n samples of one rank, as long as any in training,
            and with padding if training has any.
        memory: of each rank's device: bytes, a size such as "80GiB", or a GPU's name such as "H100".
        ranks: ranks that train the model together, in one process group.
        margin: fraction of what torch's allocator may use that is kept free, in [0, 1).
        batch_sizes: sizes to plan beside the largest.
        device: "cpu" plans a run on the CPU, where nothing is added to the traced bytes.
        title: the plan's heading; None: the type of the model.
        assumptions: a sentence to print with the plan.

    Returns:
        The plan: ``plan.decisive`` has the largest and the safe batch, and the memory of the largest.

    Raises:
        InputError: an argument is invalid, or the loop cannot be traced; the message says why (a ``ValueError``).
    """
    if not isinstance(batch_sizes, Iterable):
        raise InputError(f"`batch_sizes` must be a list of integers, but is {quote(batch_sizes)} instead.")
    batch_sizes = [require_integer("batch_sizes", size, minimum=1) for size in batch_sizes]
    require_callable(
        build_model=build_model, build_optimizer=build_optimizer, train_step=train_step, make_batch=make_batch
    )
    require_one_of("device", device, ("cuda", "cpu"))
    margin = SearchOptions(margin=margin).margin  # checked
    card = Card.named(str(memory))
    on_cuda = device == "cuda"
    traced = trace_loop(build_model, build_optimizer, train_step, make_batch, ranks=ranks, like_cuda=on_cuda)
    return plan_of_loop(
        traced,
        card,
        ranks=ranks,
        margin=margin,
        overhead=None if on_cuda else Overhead(),
        batch_sizes=batch_sizes,
        title=title or traced.model_name,
        assumptions=assumptions,
    )


def plan_of_loop(
    traced: TracedLoop,
    card: Card,
    *,
    ranks: int,
    margin: float = SearchOptions.margin,
    overhead: Overhead | None = None,
    batch_sizes: Sequence[int],
    title: str,
    assumptions: str,
    used: int | None = None,
) -> LoopPlan:
    """What fits of a traced loop on the ``card`` of each rank, with its own ``overhead`` unless another is given.

    Args:
        used: the batch size of the run, where no search finds it; None: the largest that fits.
    """
    overhead = overhead or card.overhead(ranks, has_group=ranks > 1)
    device = Device(name=card.name, memory_bytes=card.memory_bytes, margin=margin, overhead=overhead)
    sizes = BatchSizes(traced.step, device)
    most = used or sizes.largest or 1
    length = sizes.plan(used=most, searches=used is None, tokens_per_step=None, asked=batch_sizes)
    return LoopPlan(
        title=title,
        world_size=ranks,
        device=device,
        step=traced,
        lengths=(length,),
        uses_largest=used is None,
        assumptions=" ".join(filter(None, (assumptions, _EAGER if traced.is_compiled else "", device.overhead.note))),
    )

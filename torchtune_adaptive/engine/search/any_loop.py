"""``find_max_batch_size`` and ``find_max_tokens``: the search for any PyTorch training loop."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.ddp_ledger import without_reducer
from torchtune_adaptive.engine.distributed.fsdp_state import drop_forward_passes, fsdp_states
from torchtune_adaptive.engine.loop import Loop, is_compiled
from torchtune_adaptive.engine.memory.devices import computing_device, limit_bytes_of, meter_for, optimizers_of
from torchtune_adaptive.engine.memory.phases import phases_by_hooks
from torchtune_adaptive.engine.recovery.optimizer_state import check_optimizers
from torchtune_adaptive.engine.search.find import search
from torchtune_adaptive.engine.search.options import SearchOptions, Strategy
from torchtune_adaptive.engine.search.strategies import NO_BOUND, SMALL_BATCH_SIZES, Probe, SearchResult
from torchtune_adaptive.engine.search.token_budget import search_token_budget
from torchtune_adaptive.errors import InputError, require_callable, require_integer
from torchtune_adaptive.text import count_text


def find_max_batch_size(
    train_step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    memory_limit: int | str | None = None,
    strategy: Strategy = SearchOptions.strategy,
    power_of_two: bool = SearchOptions.power_of_two,
    margin: float = SearchOptions.margin,
    max_batch_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> SearchResult:
    """Finds the largest batch size whose train step fits into memory, for any PyTorch training loop.

    It restores model, optimizer and random generators bit for bit, and sets gradients to None. The caller must protect
    everything else that ``train_step`` changes, such as a learning rate schedule or a gradient scaler. All ranks that
    train the model must call it with the same arguments; only ``memory_limit`` may differ. They get the same sizes,
    the largest that fit on every rank. On CUDA, an optimizer without state empties the allocator's cache before its
    first step, so that training has the memory that the search had.

    Args:
        train_step: a whole step on a batch: forward pass, loss, backward pass, optimizer step. If training uses
            gradient accumulation, run the forward and backward pass twice: the second one needs more memory, because
            gradients of the first one exist.
        make_batch: ``make_batch(n)`` returns a worst-case batch of n samples, as long as any in training, and with
            padding if training has any: attention needs more memory with a mask. If it returns fewer samples, as at the
            end of a data set, their number is the largest size that is tried.
        model: on the CPU or on CUDA; plain, FSDP2, or any other model whose ranks issue the same collectives.
        optimizer: the optimizer, or several. A step of two samples creates their state before memory is measured. If a
            gradient scaler skips this step, the search creates it for Adam and AdamW only.
        memory_limit: memory that this rank may use, in bytes or as text such as "80GiB". None: all memory of the
            device. Required on the CPU.
        strategy: "linear_extrapolation", "binary_search" or "decrease_until_oom". The last needs ``max_batch_size``.
        power_of_two: round the size down to a power of two.
        margin: fraction of the limit that is kept free, in [0, 1).
        max_batch_size: the largest size to try.
        process_group: the ranks that train the model. None: those of the mesh on which FSDP2 has sharded it, or all
            ranks of the default group if it is not sharded.

    Raises:
        InputError: an argument is invalid (a ``ValueError``).
        NothingFitsError: a batch of one sample does not fit (an ``InputError``).

    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(batch):
    ...     model(batch).sum().backward()
    ...     optimizer.step()
    >>> found = find_max_batch_size(
    ...     train_step, lambda n: torch.ones(n, 8), model=model, optimizer=optimizer, memory_limit="64KiB", margin=0.0
    ... )
    >>> found.batch_size
    1019
    """
    options = SearchOptions(
        strategy=strategy,
        power_of_two=power_of_two,
        max_batch_size=max_batch_size,
        memory_limit_bytes=limit_bytes_of(memory_limit),
        margin=margin,
    )
    if strategy == "decrease_until_oom" and max_batch_size is None:
        raise InputError("`decrease_until_oom` needs `max_batch_size`, from which it starts.")
    require_callable(make_batch=make_batch)
    with searched_loop(train_step, model, optimizer, process_group) as loop:
        bound = options.max_batch_size or NO_BOUND
        return search(loop, lambda n: [make_batch(n)], options, start=SMALL_BATCH_SIZES[0], bound=bound)


@dataclass(frozen=True, kw_only=True)
class TokenSearchResult:
    """The result of ``find_max_tokens``.

    Attributes:
        max_tokens: the most tokens of a micro-batch, padding included, with which rows of any length fit.
        seq_len: tokens of the longest row.
        longest: the search with rows of ``seq_len`` tokens.
        shorter: the probes with shorter rows, each with the length of its rows.
    """

    max_tokens: int
    seq_len: int
    longest: SearchResult
    shorter: tuple[tuple[int, Probe], ...]

    def __str__(self) -> str:
        return (
            f"{self.max_tokens} tokens (rows of {self.seq_len} tokens: {self.longest.exact_batch_size}; shorter rows:"
            f" {count_text(len(self.shorter), 'probe')})"
        )


def find_max_tokens(
    train_step: Callable[[Any], object],
    make_batch: Callable[[int, int], Any],
    *,
    seq_len: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    memory_limit: int | str | None = None,
    margin: float = SearchOptions.margin,
    max_rows: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> TokenSearchResult:
    """Finds the largest token budget of a micro-batch, for loops that pad or pack rows up to so many tokens.

    It searches with rows of ``seq_len`` tokens. Then it tries the budget with rows of a half, a quarter and an eighth
    of that length, and lowers it if they need more memory per token. Everything else is as in ``find_max_batch_size``.

    Args:
        train_step: as for ``find_max_batch_size``.
        make_batch: ``make_batch(rows, length)`` returns a batch of so many rows of ``length`` tokens each; for packed
            rows, one row of so many documents.
        seq_len: tokens of the longest row or document in training.
        max_rows: the most rows that a micro-batch can have. None: no such bound.

    Raises:
        InputError: an argument is invalid (a ``ValueError``).
        NothingFitsError: a single row of ``seq_len`` tokens does not fit (an ``InputError``).

    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def train_step(batch):
    ...     model(batch).sum().backward()
    ...     optimizer.step()
    >>> def make_batch(rows, length):
    ...     return torch.ones(rows, length, 8)
    >>> found = find_max_tokens(
    ...     train_step, make_batch, seq_len=100, model=model, optimizer=optimizer, memory_limit="64KiB", margin=0.0
    ... )
    >>> found.max_tokens
    1019
    """
    require_integer("seq_len", seq_len, minimum=1)
    require_callable(make_batch=make_batch)
    options = SearchOptions(memory_limit_bytes=limit_bytes_of(memory_limit), margin=margin)
    bound = NO_BOUND if max_rows is None else require_integer("max_rows", max_rows, minimum=1)
    with searched_loop(train_step, model, optimizer, process_group) as loop:

        def micro_batches(rows: int, length: int) -> list[Any]:
            return [make_batch(rows, length)]

        longest = search(
            loop, lambda rows: micro_batches(rows, seq_len), options, start=SMALL_BATCH_SIZES[0], bound=bound
        )
        budget, tried = search_token_budget(
            loop, micro_batches, options, longest, seq_len=seq_len, max_rows=longest.bound
        )
    return TokenSearchResult(max_tokens=budget, seq_len=seq_len, longest=longest, shorter=tuple(tried))


@contextlib.contextmanager
def searched_loop(
    train_step: Callable[[Any], object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    process_group: dist.ProcessGroup | None,
) -> Iterator[Loop]:
    """Context: the loop of a search. On exit, CUDA's cache is prepared for training.

    The reducer of a ``DistributedDataParallel`` takes no part, because it cannot be reset after a step that failed. Its
    buckets are in memory nevertheless.
    """
    require_callable(train_step=train_step)
    device = computing_device(model)
    optimizers = optimizers_of(optimizer)
    if is_compiled(model) and device.type == "cpu":
        raise InputError(
            "`model` is compiled: on the CPU the memory of compiled code cannot be measured. Search before it is."
        )
    drop_forward_passes(fsdp_states(model))  # after one, some parameters are whole instead of sharded
    check_optimizers(optimizers, model)
    meter = meter_for(device, model, optimizers)
    with (
        phases_by_hooks(model, optimizers, meter.enter_phase),
        contextlib.closing(Consensus.of(model, process_group)) as consensus,
        contextlib.ExitStack() as stack,
    ):
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                if module.static_graph:  # steps without its reducer would confuse it for good
                    raise InputError("DistributedDataParallel with `static_graph` cannot be searched: turn it off.")
                stack.enter_context(without_reducer(module))
        yield Loop(
            micro_step=train_step, model=model, optimizers=optimizers, device=device, meter=meter, consensus=consensus
        )
    if is_compiled(model):
        torch.compiler.reset()  # code compiled for probes would make the sizes of training dynamic
    for one in optimizers:
        if device.type == "cuda" and not one.state:
            _empty_cache_before_first_step(one)


def _empty_cache_before_first_step(optimizer: torch.optim.Optimizer) -> None:
    """Empty the allocator's cache before the next step of ``optimizer``, which creates its state.

    Otherwise the state takes parts of blocks that activations have left, which the allocator then can neither free nor
    use whole: later steps have less memory than the search had.
    """

    @functools.cache
    def empty_cache_once() -> None:
        torch.cuda.empty_cache()

    optimizer.register_step_pre_hook(lambda *_: empty_cache_once())

"""``find_fastest``: which of several train steps that train the same is the fastest, for any PyTorch training loop."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.engine.memory.devices import check_limit, limit_bytes_of
from torchtune_adaptive.engine.search.any_loop import searched_loop
from torchtune_adaptive.engine.search.find import limit_meter
from torchtune_adaptive.engine.search.options import SearchOptions
from torchtune_adaptive.engine.search.probe import Prober
from torchtune_adaptive.engine.search.throughput import time_in_turns
from torchtune_adaptive.engine.search.timing import Timing, simplest_near_best
from torchtune_adaptive.errors import InputError, NothingFitsError, is_number, quote, require_callable
from torchtune_adaptive.text import format_bytes, text_table

_STEPS_COMPARED = 2  # the loss of the second one shows what the first has made of the model


@dataclass(frozen=True, kw_only=True)
class FastestStep:
    """The result of ``find_fastest``.

    Attributes:
        name: the first train step that is as fast as the fastest, within 2 % or the spread of their times.
        timings: by name, the times of all ``batches``; in the order in which they were given.
        peak_bytes: by name, the peak of this rank.
        left_out: by name, why a train step was not timed.
    """

    name: str
    timings: Mapping[str, Timing]
    peak_bytes: Mapping[str, int]
    left_out: Mapping[str, str]

    def __str__(self) -> str:
        """A table, with times as multiples of the first one's speed.

        >>> times = {"1 x 8": Timing((4.0,), 1), "2 x 4": Timing((2.0,), 1)}
        >>> peaks = {"1 x 8": 1000, "2 x 4": 2000}
        >>> print(FastestStep(name="2 x 4", timings=times, peak_bytes=peaks, left_out={"8 x 1": "it failed"}))
        train step  seconds  speed     peak  fastest
        ----------  -------  -----  -------  -------
        1 x 8             4   1.00   1000 B
        2 x 4             2   2.00  2.0 KiB      yes
        8 x 1: it failed
        """
        first = next(iter(self.timings.values()))
        rows = [["train step", "seconds", "speed", "peak", "fastest"]]
        for name, timing in self.timings.items():
            figures = [f"{timing.median_s:.3g}", f"{timing.rate / first.rate:.2f}"]
            is_fastest = "yes" if name == self.name else ""
            rows.append([name, *figures, format_bytes(self.peak_bytes[name]), is_fastest])
        table = [line.rstrip() for line in text_table(rows, num_names=1).splitlines()]
        return "\n".join([*table, *(f"{name}: {reason}" for name, reason in self.left_out.items())])


def find_fastest(
    train_steps: Mapping[str, Callable[[Any], Any]],
    batches: Sequence[Any],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    memory_limit: int | str | None = None,
    margin: float = SearchOptions.margin,
    tolerance: float = 0.002,
    process_group: dist.ProcessGroup | None = None,
) -> FastestStep:
    """Finds the fastest of several train steps that train the same, for any PyTorch training loop.

    For example with micro-batches of several sizes, with gradient checkpointing and without. Each one takes two steps
    from the same state. It is left out if memory runs out, if a loss is not finite, or if its losses are not those of
    the first one that was not left out.
    The others are timed in turns, each on all ``batches``, a few times. The slowest rank counts. All ranks must call it
    with the same names. It restores what ``find_max_batch_size`` does. A ``DistributedDataParallel`` does not reduce
    gradients in it, which would take each train step as long.

    Args:
        train_steps: by name, a whole step on a batch. It returns the loss, a number or a tensor of one element, and
            does not change the batch. The simplest comes first: it is chosen if no other is faster by more than 2 %,
            and by more than times vary.
        batches: those of one or more optimizer steps, as in training.
        model, optimizer, memory_limit, margin, process_group: as for ``find_max_batch_size``; a CPU needs no limit.
        tolerance: by how much losses may differ, as a fraction of the expected ones.

    Raises:
        InputError: an argument is invalid, or a train step returns no loss (a ``ValueError``).
        NothingFitsError: all train steps are left out (an ``InputError``).

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step_in_parts(batch, rows):
    ...     optimizer.zero_grad()
    ...     loss = sum(model(part).sum() / len(batch) for part in batch.split(rows))
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss.detach()
    >>> train_steps = {f"{rows} rows": lambda batch, rows=rows: step_in_parts(batch, rows) for rows in (1, 256)}
    >>> found = find_fastest(train_steps, [torch.ones(256, 8)], model=model, optimizer=optimizer)
    >>> found.name
    '256 rows'
    """
    if not isinstance(train_steps, Mapping) or not all(isinstance(name, str) for name in train_steps):
        raise InputError(f"`train_steps` must be a dict of functions by name, but is {quote(train_steps)} instead.")
    if not isinstance(batches, Sequence):  # a data loader has other batches each time
        raise InputError(f"`batches` must be a list of batches, but is a {type(batches).__name__} instead.")
    if not train_steps or not batches:
        raise InputError(f"`{'batches' if train_steps else 'train_steps'}` must not be empty.")
    require_callable(**{f"train_steps[{name!r}]": step for name, step in train_steps.items()})
    if not is_number(tolerance) or not tolerance > 0:
        raise InputError(f"`tolerance` must be a number above 0, but is {quote(tolerance)} instead.")
    options = SearchOptions(memory_limit_bytes=limit_bytes_of(memory_limit), margin=margin)
    names, losses = list(train_steps), list[float]()
    left_out: dict[str, str] = {}

    def train_step(named: tuple[str, Any]) -> Any:
        name, batch = named
        return train_steps[name](batch)

    def noted(named: tuple[str, Any]) -> None:
        losses.append(_number(named[0], train_step(named)))

    with searched_loop(train_step, model, optimizer, process_group) as loop:
        if options.memory_limit_bytes is not None:
            check_limit(options.memory_limit_bytes, loop.device)
        meter = loop.meter_for_probes()

        def trial(number: int) -> list[tuple[str, Any]]:
            return [(names[number], batch) for batch in itertools.islice(itertools.cycle(batches), _STEPS_COMPARED)]

        # The numbers of train steps take the place of batch sizes.
        prober = Prober(replace(loop, micro_step=noted), trial, meter=meter, forecasts=False)
        expected: list[float] = []
        with meter.exactly():
            limit_meter(meter, options)
            for number, name in enumerate(names):
                losses.clear()
                with loop.restored():
                    fits = prober.fits(number)
                reason = _difference(losses, expected, tolerance) if fits else prober.probes[-1].failure
                if reason := loop.consensus.first_reason(reason):
                    left_out[name] = reason
                expected = expected or ([] if reason else losses.copy())
        steps = {name: [[(name, batch)] for batch in batches] for name in names if name not in left_out}
        if not steps:
            raise NothingFitsError(f"every train step is left out: {'; '.join(map(': '.join, left_out.items()))}.")
        timings = time_in_turns(loop, steps, num_tokens=dict.fromkeys(steps, 1))
        left_out |= {name: "memory ran out when it was timed" for name in steps if name not in timings}
    peaks = dict(zip(names, (probe.peak_bytes for probe in prober.probes), strict=True))
    return FastestStep(name=simplest_near_best(timings), timings=timings, peak_bytes=peaks, left_out=left_out)


def _number(name: str, loss: Any) -> float:
    try:
        return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"The train step {name!r} must return its loss, but returns {quote(loss)} instead.") from None


def _difference(losses: Sequence[float], expected: Sequence[float], tolerance: float) -> str:
    """How losses differ from what was expected, if that is known, or from finite numbers; or ""."""
    for number, (loss, one) in enumerate(zip(losses, expected or losses, strict=True), start=1):
        if not math.isfinite(loss):
            return f"its loss in step {number} is {loss}"
        if not math.isclose(loss, one, rel_tol=tolerance):
            return f"its loss in step {number} is {loss:.6g}, but that of the first train step is {one:.6g}"
    return ""

"""Whether torch leaks host memory in the optimizer steps of a sharded model.

In torch 2.10 and 2.11 two kinds of operations leak: those on lists of DTensors, and those on single DTensors with
changing numbers. Torch 2.9.1, 2.12.1 and 2.13.0 do not leak (``benchmarks/results/host_growth_cpu.md``,
https://github.com/pytorch/pytorch/issues/181761). The version is not checked. Instead, copies of the optimizers with
tiny parameters are stepped, and the memory that stays allocated is counted.
"""

import gc
import itertools
import tracemalloc
from collections.abc import Mapping, Sequence
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from torchtune_adaptive.text import format_bytes

_STEPPED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # `defaults` has all arguments of their constructors
_IMPLEMENTATIONS: tuple[Mapping[str, bool], ...] = (
    MappingProxyType({"foreach": True, "fused": False}),
    MappingProxyType({"foreach": False, "fused": False}),
)
_WARM_UP, _STEPS = 3, 5
_SMALLEST_CHANGE = 1e-6  # of the learning rate, because a schedule changes it in each step
_changes = itertools.count(1)  # a different rate in every step here too: torch caches what depends on it
_LONG_RUN_STEPS = 10_000


def leak_warning(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """A sentence about the host memory that steps of ``optimizers`` leak, or None if they do not leak.

    It names an implementation that leaks less than half of it, if there is one. Only Adam, AdamW and SGD with DTensors
    are checked. Not a collective. The optimizers do not change.
    """
    optimizers = [one for one in optimizers if type(one) in _STEPPED and _sharded(one)]
    try:
        return _leak(optimizers) if optimizers and _Twins(optimizers[:1], tensors=1).leaks() else None
    except Exception:  # this check must not end the run; a real step shows its own errors
        return None


def _leak(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """A sentence about the memory that steps of ``optimizers`` leak."""
    leaked = _Twins(optimizers).leaked_bytes_per_step()
    choices = [(_Twins(optimizers, options).leaked_bytes_per_step(), options) for options in _IMPLEMENTATIONS]
    least, options = min(choices, key=lambda choice: choice[0])
    advice = "torch 2.12.1 does not"
    if least < leaked / 2:
        chosen = " ".join(f"optimizer.{name}={value}" for name, value in options.items())
        advice += f", and {chosen} leaks {format_bytes(round(least))}"
    return (
        f"{type(optimizers[0]).__name__} of torch {torch.__version__} leaks {format_bytes(round(leaked))} of host"
        f" memory per rank in each optimizer step of this sharded model,"
        f" {format_bytes(round(_LONG_RUN_STEPS * leaked))} in {_LONG_RUN_STEPS} steps: {advice}."
    )


class _Twins:
    """Copies of ``optimizers`` with tiny parameters, and with ``options`` replaced.

    Parameters of equal shape, type and placements get tiny parameters of equal shape, because torch caches shardings by
    shape.
    Args:
        tensors: the most parameters per optimizer; None: all.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        tensors: int | None = None,
    ) -> None:
        self._tensors = tensors
        self._sizes: dict[Any, int] = {}
        self._twins = [self._twin(one, options) for one in optimizers]
        self._step(_WARM_UP)

    def leaks(self) -> bool:
        """Whether each step leaves objects that the garbage collector tracks but does not collect."""
        before = len(gc.get_objects())
        self._step(_STEPS)
        return len(gc.get_objects()) - before >= _STEPS

    def leaked_bytes_per_step(self) -> float:
        """Memory of Python objects that one more step leaves."""
        was_tracing = tracemalloc.is_tracing()
        if not was_tracing:
            tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            self._step(_STEPS)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            if not was_tracing:
                tracemalloc.stop()
        return max(after - before, 0) / _STEPS

    def _twin(self, optimizer: Any, options: Mapping[str, Any]) -> Any:
        takes = signature(type(optimizer)).parameters
        given = {name: value for name, value in (optimizer.defaults | options).items() if name in takes}
        return type(optimizer)([self._tiny(one) for one in _sharded(optimizer)[: self._tensors]], **given)

    def _tiny(self, sharded: DTensor) -> nn.Parameter:
        size = self._sizes.setdefault((sharded.shape, sharded.dtype, sharded.placements), len(self._sizes) + 1)
        local = torch.zeros(size, dtype=sharded.dtype, device=sharded.to_local().device)
        placements = [Replicate()] * sharded.device_mesh.ndim
        parameter = nn.Parameter(DTensor.from_local(local, sharded.device_mesh, placements))
        parameter.grad = torch.zeros_like(parameter)
        return parameter

    def _step(self, times: int) -> None:
        for _ in range(times):
            factor = 1 - _SMALLEST_CHANGE * next(_changes)
            for twin in self._twins:
                for group in twin.param_groups:
                    group["lr"] = twin.defaults["lr"] * factor
                twin.step()
        gc.collect()


def _sharded(optimizer: torch.optim.Optimizer) -> list[DTensor]:
    """The parameters that are DTensors."""
    return [one for group in optimizer.param_groups for one in group["params"] if isinstance(one, DTensor)]

"""Run something on the real model and optimizer and leave no trace of it.

What is saved goes to host memory, so that the device holds no second copy which a probe would measure:
trainable parameters (this rank's shards), buffers, optimizer state, and the random generators. Frozen
parameters are not saved, because nothing writes to them.
"""

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.distributed.fsdp_state import reset_after_failure
from torchtune_adaptive.memory.operations import plain_parts


@contextmanager
def leave_no_trace(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """On leaving, also by an exception, everything is as it was on entering, bit for bit, and gradients are None.

    Gives a function that puts the optimizer back alone, for when a step failed while it made the optimizer's
    state: the next one would take the half for the whole.

    Covers parameters, buffers, the optimizer's state and options, and the random generators of Python,
    NumPy, the CPU and the devices in use. Not a collective: each rank saves and restores its own.
    """
    tensors = [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]
    copies = [_Copy(tensor) for tensor in tensors]
    saved_optimizer = _SavedOptimizer(optimizer)
    with keep_random_states():
        try:
            yield saved_optimizer.restore
        finally:
            reset_after_failure(model)
            for saved in copies:
                saved.restore()
            saved_optimizer.restore()


@contextmanager
def keep_random_states() -> Iterator[None]:
    """On leaving, the random generators of Python, NumPy, the CPU and the CUDA devices are as on entering."""
    states = RandomStates()
    try:
        yield
    finally:
        states.restore()


class RandomStates:
    """The states of the random generators of Python, NumPy, the CPU and the CUDA devices when it is made.

    Of CUDA devices all are asked, or ``device`` alone.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
        self._python_state = random.getstate()
        self._numpy_state = self._numpy_random.get_state() if self._numpy_random else None
        self._cpu_state = torch.get_rng_state()
        devices = range(torch.cuda.device_count()) if device is None else [device] if device.type == "cuda" else []
        self._cuda_states = [(one, torch.cuda.get_rng_state(one)) for one in devices if torch.cuda.is_initialized()]

    def restore(self) -> None:
        """Bring the generators back to these states."""
        random.setstate(self._python_state)
        if self._numpy_random:
            self._numpy_random.set_state(self._numpy_state)
        torch.set_rng_state(self._cpu_state)
        for device, state in self._cuda_states:
            torch.cuda.set_rng_state(state, device)


class KeptBuffers:
    """Copies of a model's buffers, where they are: making them does not wait for the device."""

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._copies = [
            (buffer, part.detach(), part.detach().clone()) for buffer in buffers for part in plain_parts(buffer)
        ]

    def changed(self) -> list[torch.Tensor]:
        """Those that differ from their copies, or hold a NaN.

        Version counters do not tell: batch normalisation leaves them alone.
        """
        changed = {id(buffer): buffer for buffer, part, copied in self._copies if not torch.equal(part, copied)}
        return list(changed.values())

    @torch.no_grad()
    def restore(self) -> None:
        """Bring the buffers back to their copies."""
        for _, part, copied in self._copies:
            part.copy_(copied)


class _SavedOptimizer:
    """An optimizer's state and options. Tensors that were there keep their identity; what a step added is removed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {parameter: _save(values) for parameter, values in optimizer.state.items()}
        self._groups = [_save(_options(group)) for group in optimizer.param_groups]
        # A step sets this flag, by which a scheduler tells whether it was stepped too early.
        self._stepped = vars(optimizer).get("_opt_called")

    def restore(self) -> None:
        state = self._optimizer.state
        for parameter in list(state):
            if parameter not in self._state:
                del state[parameter]
        for parameter, saved in self._state.items():
            _restore(state[parameter], saved)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            _restore(group, saved, keep=("params",))
        vars(self._optimizer).pop("_opt_called", None)
        if self._stepped is not None:
            vars(self._optimizer)["_opt_called"] = self._stepped


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _save(values: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each value with a copy of it: tensors on the host, anything else copied deeply."""
    return {
        name: (value, _Copy(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value))
        for name, value in values.items()
    }


def _restore(values: dict[str, Any], saved: dict[str, tuple[Any, Any]], keep: tuple[str, ...] = ()) -> None:
    for name in [name for name in values if name not in saved and name not in keep]:
        del values[name]
    for name, (original, value) in saved.items():
        if isinstance(value, _Copy):
            value.restore()
            values[name] = original
        else:
            values[name] = value


class _Copy:
    """A copy of a tensor on the host, part by part: a wrapper's own copy may share memory with it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._parts = [(part.detach(), part.detach().to("cpu", copy=True)) for part in plain_parts(tensor)]

    @torch.no_grad()
    def restore(self) -> None:
        for part, value in self._parts:
            part.copy_(value)

"""Stand-ins for code that needs CUDA. They hold the same memory on fake tensors."""

import math
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from torchtune_adaptive.errors import InputError, quote

_BITSANDBYTES_ADAM = re.compile(r"bitsandbytes\.optim\.(Paged)?AdamW?(8bit|32bit)?")


def stand_in_for_optimizer(optimizer: DictConfig) -> DictConfig:
    """Return the `optimizer` of a config, or a stand-in if it runs on CUDA only.

    Raises:
        InputError: it is an optimizer of bitsandbytes, but not of its Adam family.
    """
    component = str(optimizer._component_)
    if not component.startswith("bitsandbytes."):
        return optimizer
    match = _BITSANDBYTES_ADAM.fullmatch(component)
    if match is None:
        raise InputError(f"`optimizer` of bitsandbytes must be one of its Adam family, but is {quote(component)}.")
    stand_in = f"{__name__}.{BlockwiseAdam.__name__}"
    paged, bits = match[1] is not None, 8 if match[2] == "8bit" else 32
    return OmegaConf.create({"_component_": stand_in, "lr": 0.0, "bits": bits, "paged": paged})


class BlockwiseAdam(torch.optim.Optimizer):
    """Holds the state of bitsandbytes' Adam and AdamW, whose step runs one kernel for each parameter.

    State of 8 bits has a scale for each block, and small parameters have state of 32 bits. Paged state of large
    parameters is in managed memory, which can move to the host; it is not allocated here, only counted. See
    ``get_state_buffer`` and ``init_state`` in bitsandbytes/optim/optimizer.py; blocks have 256 elements since release
    0.45, and had 2048 before.

    Attributes:
        paged_bytes: paged state.
    """

    _SMALL_FOR_8_BITS, _SMALL_FOR_PAGES, _BLOCK = 4096, 100_000, 256

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, bits: int, paged: bool) -> None:
        super().__init__(params, {"lr": lr})
        self._bits, self._paged = bits, paged
        self.paged_bytes = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Allocate the state of parameters that have a gradient and no state yet."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.grad is None or parameter in self.state:
                continue
            state = self.state[parameter]
            numel = parameter.numel()
            small = self._bits == 32 or numel < self._SMALL_FOR_8_BITS
            dtype = torch.float32 if small else torch.uint8
            if self._paged and numel >= self._SMALL_FOR_PAGES:
                self.paged_bytes += 2 * numel * dtype.itemsize
            else:
                state |= {name: torch.zeros_like(parameter, dtype=dtype) for name in ("state1", "state2")}
            if not small:
                blocks = math.ceil(numel / self._BLOCK)
                state |= {name: torch.zeros(blocks, dtype=torch.float32) for name in ("absmax1", "absmax2")}


class OffloadedActivations(saved_tensors_hooks):
    """Holds the tensors that torchtune's ``OffloadActivations``, with streams and defaults, holds on the device.

    In forward it keeps the last saved tensors, whose copies to the host may not be done. In backward it keeps the
    tensors brought back for the last operation, until the next operation is done.
    """

    _STASHED, _SMALLEST_BYTES = 5, 1024

    def __init__(self) -> None:
        self._stash: deque[tuple[int, torch.Tensor]] = deque(maxlen=self._STASHED)
        self._brought_back: deque[torch.Tensor] = deque(maxlen=2)
        self._last = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, saved: torch.Tensor) -> Any:
        self._last += 1
        self._brought_back.clear()
        if saved.nbytes < self._SMALLEST_BYTES or isinstance(saved, nn.Parameter | nn.Buffer):
            return saved
        self._stash.append((self._last, saved))
        return self._last, saved.shape, saved.stride(), saved.dtype

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        number, shape, stride, dtype = packed
        stashed = dict(self._stash).get(number)
        self._stash.clear()
        tensor = torch.empty_strided(shape, stride, dtype=dtype) if stashed is None else stashed
        self._brought_back.append(tensor)
        return tensor

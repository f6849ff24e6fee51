"""Stand-ins for optimizers that cannot run on fake tensors: they allocate the same state and temporary memory."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.engine.memory.operations import local_part
from torchtune_adaptive.errors import InputError, quote, require_integer

_BITSANDBYTES = re.compile(r"bitsandbytes\.optim\.(Paged)?([A-Z][A-Za-z]*?)(8bit|32bit)?")
# Number of state tensors per parameter, by the optimizer's name.
_STATES = MappingProxyType(
    {"Adam": 2, "AdamW": 2, "LAMB": 2, "Lion": 1, "RMSprop": 1, "Adagrad": 1, "LARS": 1, "SGD": 1, "AdEMAMix": 3}
)
_STATES_BY_WHOLE_NAME = MappingProxyType({"AdEMAMix32bit": 2})  # which bitsandbytes gives the state of Adam
_LIMITING_UPDATES = ("LAMB", "LARS")  # relative to the parameter's norm, unless `max_unorm` is 0
_SMALL_FOR_8_BITS = 4096  # elements: below, bitsandbytes keeps 32-bit state by default
_TORCHAO = re.compile(r"torchao\.(?:optim|prototype\.low_bit_optim)\.AdamW?(8bit|4bit|Fp8)")
_WITHOUT_STATE = re.compile(r"torchao\..*\.CPUOffloadOptimizer")


def stand_in_for_optimizer(optimizer: Any) -> Any:
    """Return the `optimizer` of a config, a mapping, or that of a stand-in if it cannot run on fake tensors.

    Raises:
        InputError: it is an optimizer of bitsandbytes whose state is unknown, or one that recipes cannot train with.
    """
    component = str(optimizer["_component_"])
    if match := _TORCHAO.fullmatch(component):
        if optimizer.get("amsgrad", False):
            raise InputError(f"`optimizer.amsgrad` must be False for {component}, whose first step fails with it.")
        return _stand_in(LowBitAdam, bits=match[1], block_size=optimizer.get("block_size", None))
    if _WITHOUT_STATE.fullmatch(component):
        raise InputError(
            f"`optimizer` must have a `state`, which recipes save and restore, but {quote(component)} has none."
        )
    if not component.startswith("bitsandbytes."):
        return optimizer
    match = _BITSANDBYTES.fullmatch(component)
    if match is None or match[2] not in _STATES:
        names = ", ".join(_STATES)
        raise InputError(f"`optimizer` of bitsandbytes must be one of {names}, but is {quote(component)} instead.")
    bits = int(match[3].removesuffix("bit")) if match[3] else optimizer.get("optim_bits", 32)
    if bits not in (8, 32):
        raise InputError(f"`optimizer.optim_bits` must be 8 or 32, but is {quote(bits)} instead.")
    return _stand_in(
        BlockwiseOptimizer,
        bits=bits,
        paged=match[1] is not None or bool(optimizer.get("is_paged", False)),
        states=_STATES_BY_WHOLE_NAME.get(f"{match[2]}{match[3]}", _STATES[match[2]]),
        keeps_norm=match[2] in _LIMITING_UPDATES and bool(optimizer.get("max_unorm", 1.0)),
        min_8bit_size=require_integer(
            "optimizer.min_8bit_size", optimizer.get("min_8bit_size", _SMALL_FOR_8_BITS), minimum=0
        ),
    )


def _stand_in(optimizer: type, **options: Any) -> dict[str, Any]:
    return {"_component_": f"{__name__}.{optimizer.__name__}", "lr": 0.0} | options


class _StandIn(torch.optim.Optimizer):
    """Creates ``_state_of`` once for each parameter with a gradient, and calls ``_take_step`` for it in each step."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the step of each parameter that has a gradient."""
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            if parameter not in self.state:
                self.state[parameter].update(self._state_of(parameter))
            self._take_step(parameter)
            parameter.zero_()  # an operation of the optimizer's, which takes no memory

    def _state_of(self, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        """The state that the optimizer keeps for ``parameter``."""
        raise NotImplementedError

    def _take_step(self, parameter: nn.Parameter) -> None:
        """Allocate and free the temporary memory that a step of ``parameter`` needs beside its state."""


class BlockwiseOptimizer(_StandIn):
    """Holds the state of bitsandbytes' optimizers, whose step runs one kernel per parameter.

    8-bit state has a scale for each block; small parameters have 32-bit state. With ``keeps_norm`` each parameter's
    state also has the norm of its update. Paged state of large parameters is in managed memory, which can move to the
    host. It is counted here, but not allocated. See ``get_state_buffer`` and ``init_state`` in
    bitsandbytes/optim/optimizer.py. Blocks have 256 elements since release 0.45, and had 2048 before.

    Attributes:
        paged_bytes, whole_paged_bytes: bytes of paged state, of this rank and over all ranks.
    """

    _SMALL_FOR_PAGES, _BLOCK = 100_000, 256

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        bits: int,
        paged: bool,
        states: int,
        keeps_norm: bool,
        min_8bit_size: int,
        in_32_bits: Iterable[nn.Parameter] = (),
    ) -> None:
        super().__init__(params, lr=lr)
        self._in_32_bits = {id(parameter) for parameter in in_32_bits}
        self._bits, self._paged, self._states, self._min_8bit_size = bits, paged, states, min_8bit_size
        self._keeps_norm = keeps_norm
        self.paged_bytes = self.whole_paged_bytes = 0

    def _state_of(self, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        numel, local_numel = parameter.numel(), local_part(parameter).numel()
        small = self._bits == 32 or numel < self._min_8bit_size or id(parameter) in self._in_32_bits
        dtype = torch.float32 if small else torch.uint8
        if self._paged and numel >= self._SMALL_FOR_PAGES:
            self.paged_bytes += self._states * local_numel * dtype.itemsize
            self.whole_paged_bytes += self._states * numel * dtype.itemsize
        else:
            state |= {f"state{n}": torch.zeros_like(parameter, dtype=dtype) for n in range(self._states)}
        if not small:
            blocks = math.ceil(local_numel / self._BLOCK)
            state |= {f"absmax{n}": torch.zeros(blocks, dtype=torch.float32) for n in range(self._states)}
        if self._keeps_norm:
            state["unorm_vec"] = torch.zeros(1, dtype=torch.float32)
        return state


@dataclass(frozen=True)
class _Format:
    """How torchao stores one of Adam's two states.

    Attributes:
        bytes_per_element: bytes of a code.
        block: elements that share a scale.
        codes_of_map: entries of the table that maps codes to values.
        taken_per_element: temporary bytes of a parameter's compiled step: buffers that Inductor's code for a CPU
            allocates (torch 2.13, torchao 0.15). Not measured on a GPU.
    """

    bytes_per_element: float
    block: int
    codes_of_map: int
    taken_per_element: float


_FORMATS = MappingProxyType(
    {"8bit": _Format(1, 256, 256, 8), "4bit": _Format(0.5, 128, 16, 24), "Fp8": _Format(1, 256, 0, 0)}
)


class LowBitAdam(_StandIn):
    """Holds the state of torchao's 8-bit, 4-bit and float8 Adam and AdamW, and the memory of their compiled step.

    A parameter whose local part has fewer than 4096 elements, or is not a whole number of blocks, has state of its own
    shape and type (``_new_buffer`` in torchao/optim/adam.py).
    """

    _SMALL = 4096

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, bits: str, block_size: int | None = None) -> None:
        super().__init__(params, lr=lr)
        self._format = _FORMATS[bits]
        self._block = block_size or self._format.block

    def _is_small(self, local: torch.Tensor) -> bool:
        return local.numel() < self._SMALL or local.numel() % self._block != 0

    def _state_of(self, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        local = local_part(parameter)
        if self._is_small(local):
            return {name: torch.zeros_like(local) for name in ("exp_avg", "exp_avg_sq")}
        return {
            f"{part}{n}": torch.zeros(elements, dtype=dtype)
            for n in range(2)
            for part, elements, dtype in (
                ("codes", int(local.numel() * self._format.bytes_per_element), torch.uint8),
                ("scale", local.numel() // self._block, torch.float32),
                ("map", self._format.codes_of_map, torch.float32),
            )
        }

    def _take_step(self, parameter: nn.Parameter) -> None:
        local = local_part(parameter)
        if not self._is_small(local):
            torch.empty(int(local.numel() * self._format.taken_per_element), dtype=torch.uint8)

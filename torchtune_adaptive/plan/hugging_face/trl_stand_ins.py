"""TRL's kernels and offloading on fake tensors: they take the memory that they take on a GPU."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torchtune_adaptive.plan.trace.offloaded_activations import OffloadedActivations

_TILES = "trl.kernels.chunked_logprob"


class NoKernel:
    """A kernel of Triton, which writes to tensors that exist, and takes no memory."""

    def __getitem__(self, _: Any) -> Any:
        return lambda *_, **__: None


@contextmanager
def trl_as_on_cuda() -> Iterator[None]:
    """Context: TRL, if it is there, takes on fake tensors what it takes on CUDA with Triton."""
    with kernels_do_nothing(), _replaced(_of_fake_tensors):
        yield


@contextmanager
def kernels_do_nothing() -> Iterator[None]:
    """Context: TRL, if it is there, chooses as on CUDA with Triton, whose kernels do nothing."""
    for name in ("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", _TILES):
        try:
            importlib.import_module(name)
        except ImportError:
            break
    with _replaced(_of_kernels):
        yield


def tokens_of_a_tile() -> int:
    """The tokens that TRL's loss works on at a time; 0 if TRL is not there, or works on all at once."""
    try:
        return getattr(importlib.import_module(_TILES), "TOKEN_CHUNK_SIZE", 0)
    except ImportError:
        return 0


@contextmanager
def _replaced(stand_ins: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Context: modules of TRL have ``stand_ins`` of their attributes. Kernels' modules get those they lack as well."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not name.startswith("trl."):
                continue
            for attribute, stand_in in stand_ins(vars(module)).items():
                if hasattr(module, attribute) or name.startswith("trl.kernels."):
                    stack.enter_context(mock.patch.object(module, attribute, stand_in, create=True))
        yield


def _of_kernels(attributes: dict[str, Any]) -> dict[str, Any]:
    """What takes the place of Triton, of its kernels, and of one call of cuBLAS that works in place."""
    kernels = {name: NoKernel() for name in attributes if name.endswith("_kernel")}
    triton = SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    return kernels | {"triton": triton, "_use_triton": lambda _: True, "_addmm_fp32": lambda *_: None}


def _of_fake_tensors(attributes: dict[str, Any]) -> dict[str, Any]:
    """What takes the place of loops over tiles of tokens, and of copies to the host."""
    return {
        "range": functools.partial(_one_tile, attributes),
        "get_act_offloading_ctx_manager": lambda *_, **__: OffloadedActivations(),
    }


def _one_tile(attributes: dict[str, Any], *bounds: int) -> range:
    """``range``, but of tiles of tokens the first alone: each takes the memory that the one before has given back."""
    whole = range(*bounds)
    return whole[:1] if whole.step == attributes.get("TOKEN_CHUNK_SIZE") else whole

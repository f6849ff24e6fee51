"""TRL's kernels and offloading on fake tensors: they take the memory that they take on a GPU."""

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torchtune_adaptive.plan.trace.offloaded_activations import OffloadedActivations


class _NoKernel:
    """A kernel of Triton, which writes to tensors that exist, and takes no memory."""

    def __getitem__(self, _: Any) -> Any:
        return lambda *_, **__: None


@contextmanager
def trl_as_on_cuda() -> Iterator[None]:
    """Context: TRL, if it is there, chooses as on CUDA with Triton, whose kernels do nothing."""
    for name in ("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.kernels.chunked_logprob"):
        try:
            importlib.import_module(name)
        except ImportError:
            break
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not name.startswith("trl."):
                continue
            for attribute, stand_in in _stand_ins(name, vars(module)):
                stack.enter_context(
                    mock.patch.object(module, attribute, stand_in, create=attribute in ("triton", "range"))
                )
        yield


def tokens_of_a_tile() -> int:
    """The tokens that TRL's loss works on at a time; 0 if TRL is not there, or works on all at once."""
    return getattr(sys.modules.get("trl.kernels.chunked_logprob"), "TOKEN_CHUNK_SIZE", 0)


def _one_tile(attributes: dict[str, Any], *bounds: int) -> range:
    """``range``, but of tiles of tokens the first alone: each takes the memory that the one before has given back."""
    whole = range(*bounds)
    return whole[:1] if whole.step == attributes.get("TOKEN_CHUNK_SIZE") else whole


def _stand_ins(name: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What takes the place of a module's attributes."""
    if name.startswith("trl.kernels."):
        yield "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b))
        yield "range", functools.partial(_one_tile, attributes)
        for attribute in attributes:
            if attribute.endswith("_kernel"):
                yield attribute, _NoKernel()
    known = {
        "_use_triton": lambda _: True,
        "_addmm_fp32": lambda *_: None,  # one call of cuBLAS, in place
        "get_act_offloading_ctx_manager": lambda *_, **__: OffloadedActivations(),
    }
    for attribute, stand_in in known.items():
        if attribute in attributes:
            yield attribute, stand_in

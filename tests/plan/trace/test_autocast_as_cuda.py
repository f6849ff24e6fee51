"""Autocast of CPU tensors as CUDA's: the lists are torch's own, and nothing stays behind."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune_adaptive.plan.trace import autocast_as_cuda as lists
from torchtune_adaptive.plan.trace.autocast_as_cuda import autocast_as_cuda, in_lower_precision


def _registered_for_cuda() -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def test_the_lists_are_the_operations_for_which_torch_registers_kernels():
    listed = [*lists.IN_FLOAT32, *lists.TO_FLOAT32, *lists.TO_FLOAT32_BY_OVERLOAD, *lists.WIDEST]
    assert len(listed) == len(set(listed))
    assert set(listed) <= _registered_for_cuda() | {"rms_norm"}  # since torch 2.10
    # What is left are products of matrices, convolutions, recurrent cells and attention.
    words = ("conv", "mm", "cell", "attention", "lin", "matmul", "mv", "addr", "einsum", "prelu", "rnn")
    assert [name for name in in_lower_precision() if not any(word in name for word in words)] == []


def _dtypes() -> dict[str, torch.dtype]:
    """The results' types of some operations on the output of a matrix product."""
    wide, hidden = torch.ones(2, 4), torch.nn.functional.linear(torch.ones(2, 4), torch.ones(4, 4))
    results = {
        "linear": hidden,
        "softmax": hidden.softmax(-1),
        "sum": hidden.sum(),
        "pow": hidden.pow(2),
        "norm": torch.ops.aten.norm.Scalar(hidden),
        "layer_norm": torch.nn.functional.layer_norm(hidden, (4,)),
        "gelu": torch.nn.functional.gelu(hidden),
        "addcmul of both": torch.addcmul(wide, hidden, hidden),
        "prelu": torch.nn.functional.prelu(wide, torch.ones(1)),
        "softmax of float64": wide.double().softmax(-1),
    }
    return {name: result.dtype for name, result in results.items()}


def test_results_have_the_types_that_they_have_on_cuda():
    with autocast_as_cuda(), torch.autocast("cpu", torch.bfloat16):
        dtypes = _dtypes()
    half, single = torch.bfloat16, torch.float32
    assert dtypes == {
        "linear": half,
        "softmax": single,
        "sum": single,
        "pow": single,
        "norm": single,
        "layer_norm": single,
        "gelu": half,
        "addcmul of both": single,
        "prelu": half,
        "softmax of float64": torch.float64,
    }


def test_cross_entropy_does_not_copy_the_logits_in_float32_first():
    logits, labels = torch.ones(2, 4, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.long)
    seen: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with autocast_as_cuda(), torch.autocast("cpu", torch.bfloat16), Watching():
        torch.nn.functional.cross_entropy(logits, labels)
    assert seen == ["aten._log_softmax.default", "aten._to_copy.default", "aten.nll_loss_forward.default"]


def test_settings_named_for_cuda_are_those_of_the_cpu_within():
    before = torch.get_autocast_dtype("cpu")
    with autocast_as_cuda():
        assert torch.get_autocast_dtype("cuda") == torch.float16
        torch.set_autocast_enabled("cuda", True)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled()
        torch.set_autocast_enabled(False)
        assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == before
    assert not torch.is_autocast_enabled("cuda")

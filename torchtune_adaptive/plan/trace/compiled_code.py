"""A replacement for ``torch.compile`` on fake tensors that allocates the same memory as compiled code.

AOTAutograd traces a function's forward and backward pass, and its partitioner decides which tensors are saved for the
backward pass, as in a real run. Inductor's code of both graphs is replaced by a ``CompiledGraph``, which allocates and
frees the same buffers.
"""

import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torchtune.modules import TransformerCrossAttentionLayer, TransformerSelfAttentionLayer
from torchtune.modules.loss import CEWithChunkedOutputLoss

from torchtune_adaptive.plan.trace.compiled_graph import CompiledGraph
from torchtune_adaptive.plan.trace.fake_tensors import fake_like

_compiled: dict[Hashable, Callable[..., Any]] = {}  # by everything that the code depends on


def compile_layers(model: nn.Module) -> None:
    """Compile the layers of ``model`` that torchtune's ``compile_model`` compiles."""
    for module in model.modules():
        if isinstance(module, TransformerSelfAttentionLayer | TransformerCrossAttentionLayer):
            _compile_method(module, "forward")


def compile_loss(loss: nn.Module) -> nn.Module:
    """Compile what torchtune's ``compile_loss`` compiles, and return it: a new loss if there are no chunks."""
    if isinstance(loss, CEWithChunkedOutputLoss):
        _compile_method(loss, "compute_cross_entropy")
    elif hasattr(loss, "num_output_chunks"):
        for of_a_chunk in loss.children():
            _compile_method(of_a_chunk, "forward")
    else:
        loss = copy.copy(loss)
        _compile_method(loss, "forward")
    return loss


def _compile_method(module: nn.Module, name: str) -> None:
    """Replace a method of ``module`` by one with the memory of its compiled code. Hooks stay as they are."""
    method = _Method(module, getattr(module, name))
    static_key = name, *_attributes(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        # Attention is replaced as on CUDA.
        kernels = torch.nn.functional.scaled_dot_product_attention
        key = static_key, kernels, torch.is_grad_enabled(), _metadata((tensors, args, kwargs))
        if key not in _compiled:
            _compiled[key] = _compile(method, tensors, args, kwargs)
        return _compiled[key](tensors, args, kwargs)

    setattr(module, name, call)


class _Method(nn.Module):
    """Has the parameters of ``module``, and calls ``method`` of it without the hooks of ``module``."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)


def _compile(method: nn.Module, tensors: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Callable[..., Any]:
    """The compiled code of ``method``, which takes its parameters and buffers by name, ``args`` and ``kwargs``."""

    def function(tensors: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        named = {f"module.{name}": tensor for name, tensor in tensors.items()}
        return torch.func.functional_call(method, named, args, kwargs)

    def code(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        return CompiledGraph(gm.graph)

    compiled = aot_function(
        function,
        fw_compiler=code,
        bw_compiler=code,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    wants_gradients = torch.is_grad_enabled()

    def run() -> None:
        with FakeTensorMode(), torch.set_grad_enabled(wants_gradients):
            inputs = tensors, args, kwargs
            compiled(*tree_map_only(torch.Tensor, lambda one: fake_like(one).requires_grad_(one.requires_grad), inputs))

    # A new thread has none of the modes and hooks that are active around the step.
    with ThreadPoolExecutor(1) as executor:
        executor.submit(run).result()
    return compiled


def _metadata(values: Any) -> Hashable:
    """What compiled code depends on: the values' nesting, the tensors' shapes and types, and all other values."""
    leaves, structure = tree_flatten(values)
    return str(structure), tuple(_metadata_of(leaf) for leaf in leaves)


def _metadata_of(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return value
    return type(value), tuple(value.shape), value.stride(), value.dtype, value.requires_grad


def _attributes(module: nn.Module) -> Iterator[Hashable]:
    """A key that is equal if two modules have the same forward pass: types and plain attributes of all submodules."""
    for name, part in module.named_modules():
        plain = {key: value for key, value in vars(part).items() if isinstance(value, bool | int | float | str | None)}
        yield name, type(part), tuple(plain.items())

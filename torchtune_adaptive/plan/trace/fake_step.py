"""The mode in which train steps run on fake tensors. It needs torch alone.

A trace has no values. Small tensors of integers that follow from the batch alone, such as attention masks and
positions, are computed nevertheless: models read them to choose their operations.
"""

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from torchtune_adaptive.plan.trace.as_cuda import DevicesMapped, is_cuda
from torchtune_adaptive.plan.trace.fake_tensors import fake_like, shardings_worked_out_unseen

_LOG_OF_TORCH = logging.getLogger("torch._subclasses.fake_tensor")
_ATEN: Any = torch.ops.aten
_READ = _ATEN._local_scalar_dense.default
_EQUAL = _ATEN.equal.default
_INDEX = _ATEN.index.Tensor
_SELECT = _ATEN.masked_select.default
_FACTORIES = {
    _ATEN.arange.default,
    _ATEN.arange.start,
    _ATEN.arange.start_step,
    _ATEN.full.default,
    _ATEN.ones.default,
    _ATEN.zeros.default,
}
_REPEAT = _ATEN.repeat.default
_OF_ANY_SIZE = {_REPEAT, _ATEN.new_full.default, _ATEN.new_ones.default, _ATEN.new_zeros.default}
_PLAIN = (torch.Tensor, nn.Parameter)
_MOST_KNOWN = 2**20  # elements of a tensor whose values are known
_UNKNOWN_INTEGER = 99_991  # no size that anybody would choose


class CannotTraceError(Exception):
    """The step does something that needs values. The message goes on with "file:line ..."."""


class FakeStep(FakeTensorMode):
    """Mode in which a step runs on fake tensors. ``faking`` enters it.

    An unknown value that is read, for example by ``loss.item()``, is False if it is a bool, and 1 if it is a float. An
    integer is a number that must not become a size.

    Args:
        values_are_fixed: the known values are those of any batch, so that results may have sizes that depend on them.

    Attributes:
        like_cuda: code for CUDA runs on the fake tensors, which are on the device "cpu".
        has_read_values: whether an unknown value was read.
    """

    def __init__(self, *, like_cuda: bool, values_are_fixed: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.like_cuda = like_cuda
        self._values_are_fixed = values_are_fixed
        self.has_read_values = False
        self._storages: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self._adopted = WeakTensorKeyDictionary()  # by a tensor of the user's that is not fake: the fake one

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """Those of all live fake tensors."""
        return list(self._storages.values())

    @property
    def live_bytes(self) -> int:
        """Bytes of all live fake tensors."""
        return sum(storage.nbytes() for storage in self.storages)

    @contextmanager
    def faking(self) -> Iterator[None]:
        """Within the context operations run in this mode."""
        with ExitStack() as stack:
            stack.enter_context(self)
            stack.enter_context(mock.patch.object(_LOG_OF_TORCH, "disabled", True))  # the error itself is raised
            if self.like_cuda:
                stack.enter_context(DevicesMapped("cpu"))
            stack.enter_context(shardings_worked_out_unseen())
            yield

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor for the real one, whose values are known if it is small."""
        known = self.may_turn_const(tensor)
        return self.fake_tensor_converter.from_real_tensor(self, tensor, make_constant=known)

    def known(self, values: torch.Tensor) -> torch.Tensor:
        """As ``fake``, but an operation makes the tensor, so that a trace sees it. Call it in this mode."""
        made: Any = torch.empty(values.shape, dtype=values.dtype)
        made.constant = values
        return made

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Whether values of the real tensor are kept. It overrides a limit of one element."""
        return t.numel() <= _MOST_KNOWN and t.layout is torch.strided and not t.is_meta and not self.is_our_fake(t)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is _READ:
            return self._read(args[0])
        if func is _EQUAL:
            return self._are_equal(*args)
        is_dynamic = torch.Tag.dynamic_output_shape in func.tags and (func is not _INDEX or _has_mask(args[1]))
        if is_dynamic:
            if not self._values_are_fixed:
                raise DynamicOutputShapeException(func)  # even if values are known: those of other batches differ
            func, args = self._with_places(func, args)
        if is_cuda(kwargs.get("device")):  # a default device, which the function mode does not see
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if self.has_read_values:
            _require_known_sizes(func, args, kwargs)
        if func not in self.lift_fns and _has_plain((args, kwargs.values())):  # these get values of `torch.tensor`
            args, kwargs = tree_map_only(torch.Tensor, self._adopt, (args, kwargs))
        with _without_values(_operands_of_large(func, args)):
            outputs = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _FACTORIES:
            outputs = self._known(outputs, func, args, kwargs)
        self._keep_storages(outputs)
        return outputs

    def _with_places(self, func: Any, args: Any) -> tuple[Any, Any]:
        """The operation with the places that known masks select, from which the size of its result follows."""
        if func is _SELECT:
            func, args = _INDEX, (args[0], [args[1]])
        if func is not _INDEX:
            return func, args
        indices: list[Any] = []
        for one in args[1]:
            values = None if one is None or one.dtype != torch.bool else known_values(one)
            if values is None:
                indices.append(one)
                continue
            with _disable_current_modes():
                places = values.nonzero(as_tuple=True)
            indices += [self.fake(place) for place in places]
        return func, (args[0], indices)

    def _adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor that stands for one that was made before the trace, as long as that one lives."""
        if type(tensor) not in _PLAIN:
            return tensor
        if tensor not in self._adopted:
            if tensor.is_meta:
                with self:
                    self._adopted[tensor] = fake_like(tensor)
            else:
                self._adopted[tensor] = self.fake_tensor_converter.from_real_tensor(self, tensor)
            self._keep_storages(self._adopted[tensor])
        return self._adopted[tensor]

    def _keep_storages(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, FakeTensor) and value.fake_device.type == "cpu":
                storage = value.untyped_storage()
                self._storages[storage._cdata] = storage

    def _read(self, tensor: torch.Tensor) -> bool | int | float:
        known = known_values(tensor)
        if known is not None:
            with _disable_current_modes():
                return known.item()
        self.has_read_values = True
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() or tensor.is_complex() else _UNKNOWN_INTEGER

    def _are_equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        one, other = known_values(first), known_values(second)
        if one is None or other is None:
            self.has_read_values = True
            return False
        with _disable_current_modes():
            return torch.equal(one, other)

    def _known(self, made: Any, func: Any, args: Any, kwargs: Any) -> Any:
        is_whole = not (made.is_floating_point() or made.is_complex())
        if not is_whole or made.fake_device.type != "cpu" or made.numel() > _MOST_KNOWN:
            return made
        with _disable_current_modes():
            real = func(*args, **kwargs)
        return self.fake(real)


def _operands_of_large(func: Any, args: Any) -> list[FakeTensor]:
    """The tensors from whose known values torch would compute a result that is too large to be known."""
    operands = [one for one in args if isinstance(one, FakeTensor)]
    if not operands or any(one.constant is None for one in operands):
        return []
    if func in _OF_ANY_SIZE:
        num_elements = math.prod(args[1]) * (operands[0].numel() if func is _REPEAT else 1)
    elif len(operands) > 1 and torch.Tag.pointwise in func.tags:
        num_elements = math.prod(torch.broadcast_shapes(*(one.shape for one in operands)))
    else:
        return []
    return operands if num_elements > _MOST_KNOWN else []


@contextmanager
def _without_values(tensors: Sequence[FakeTensor]) -> Iterator[None]:
    kept = [one.constant for one in tensors]
    for one in tensors:
        one.constant = None
    try:
        yield
    finally:
        for one, values in zip(tensors, kept, strict=True):
            one.constant = values


def _has_plain(values: Iterable[Any]) -> bool:
    """Whether there is a tensor that is not fake, also within lists and tuples."""
    return any(type(one) in _PLAIN or (isinstance(one, list | tuple) and _has_plain(one)) for one in values)


def _has_mask(indices: Any) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices)


def known_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real tensor with the values of ``tensor``, None if they are not known."""
    return tensor.constant if isinstance(tensor, FakeTensor) else tensor


@contextmanager
def treated_as_real() -> Iterator[None]:
    """Within the context, other code treats fake tensors as real ones.

    Optimizers and clipping work on lists of them. transformers, where it is loaded, reads attention masks, which it
    otherwise builds even if no token is masked. ``tolist`` and ``numpy`` raise ``CannotTraceError`` without values.
    """
    imports = sys.modules.get("transformers.utils.import_utils")
    with ExitStack() as stack:
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            kinds = sys.modules[name]._foreach_supported_types
            kinds.append(FakeTensor)
            stack.callback(kinds.remove, FakeTensor)
        if hasattr(imports, "is_fake_tensor"):
            stack.enter_context(mock.patch.object(imports, "is_fake_tensor", _no))
        for name in ("tolist", "numpy", "__array__"):
            stack.enter_context(mock.patch.object(FakeTensor, name, _converted_by(name)))
        yield


def _no(_: object) -> bool:
    return False  # a mock's own return value would come with a record of the arguments, which keeps them alive


def _converted_by(name: str) -> Any:
    def converted(tensor: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.constant is None:
            raise CannotTraceError(f"converts a tensor by `{name}`")
        with _disable_current_modes():
            return getattr(tensor.constant, name)(*args, **kwargs)

    return converted


def _require_known_sizes(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse an operation that takes an unknown integer as a size, a place or a number of repeats."""
    parameters = func._schema.arguments
    given = [*zip((one.name for one in parameters), args, strict=False), *kwargs.items()]
    kinds = {one.name: str(one.type) for one in parameters}
    for name, value in given:
        values = value if isinstance(value, list | tuple) else (value,)
        is_size = "int" in kinds[name] or "Int" in kinds[name]
        if is_size and any(type(one) is int and one == _UNKNOWN_INTEGER for one in values):
            raise CannotTraceError(f"passes a tensor's value as `{name}` to {func}")

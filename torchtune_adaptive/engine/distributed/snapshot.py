"""Save and restore everything that train steps change, so that probes can run on the real model and optimizers.

Trainable parameters (this rank's shards), buffers, the optimizers with all that they hold, and random states are saved.
A probe does not measure the memory of the copies: see ``Copies``. Frozen parameters, which may be most of a model, are
not saved: ``UnchangedParameters`` notices if a step writes to them.
"""

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.engine.distributed.attributes import (
    SMALL_BYTES,
    KeptAttributes,
    TensorPlace,
    can_be_refilled,
    tensor_places,
)
from torchtune_adaptive.engine.distributed.fsdp_state import KeptSettings, fsdp_states, reset_after_failure
from torchtune_adaptive.engine.memory.copies import Copies, Restore
from torchtune_adaptive.engine.memory.operations import plain_parts
from torchtune_adaptive.engine.optimizers import SavedOptimizers
from torchtune_adaptive.engine.references import generators_within_reach, state_access


@contextmanager
def restore_on_exit(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    modules: Sequence[nn.Module] = (),
    generators: Sequence[Any] = (),
) -> Iterator[Callable[[], None]]:
    """Context: on exit, also after an exception, restore the state bit for bit and set gradients to None.

    This covers parameters, buffers, attributes of modules as described in ``KeptAttributes``, FSDP2's settings, all
    ``optimizers`` as described in ``SavedOptimizers``, and the random generators of Python, NumPy, the CPU and the CUDA
    devices. Not a collective: each rank saves and restores its own state.

    Yields a function that restores only the optimizers, for a step that failed while the optimizers created their
    state. The next step would otherwise use the incomplete state.

    Args:
        modules: those whose buffers and attributes are restored; by default those of ``model``.
        generators: further random generators.

    Raises:
        InputError: an optimizer cannot be restored; raised before anything happens.
    """
    modules = modules or list(model.modules())
    buffers = [(place, place.tensor) for place in tensor_places(modules)]
    of_places = {id(tensor): tensor for _, tensor in buffers if tensor is not None}.values()
    tensors = [*(parameter for parameter in model.parameters() if parameter.requires_grad), *of_places]
    attributes = KeptAttributes(modules, [place for place, _ in buffers])
    settings = KeptSettings(fsdp_states(model))
    saved_optimizers = SavedOptimizers(optimizers, model)
    with Copies([*tensors, *saved_optimizers.tensors]) as copies, keep_random_states(generators):
        restores = [copies.copy(tensor) for tensor in tensors]
        saved_optimizers.copy(copies)
        try:
            yield saved_optimizers.restore
        finally:
            reset_after_failure(model)
            settings.restore()
            attributes.restore()
            for place, tensor in buffers:
                place.put(tensor)
            for restore in restores:
                restore()
            saved_optimizers.restore()


@contextmanager
def keep_random_states(generators: Sequence[Any] = ()) -> Iterator[None]:
    """Context: on exit, restore the random generators of Python, NumPy, CPU and CUDA devices, and ``generators``."""
    states = RandomStates(generators=generators)
    try:
        yield
    finally:
        states.restore()


@contextmanager
def keep_own_generators(*functions: Callable[..., Any]) -> Iterator[None]:
    """Context: on exit, restore the random generators that ``functions`` refer to, such as a data set's own."""
    with ExitStack() as stack:
        for get, put in filter(None, map(state_access, generators_within_reach(functions))):
            stack.callback(put, get())
        yield


class RandomStates:
    """The states of the random generators of Python, NumPy, the CPU and the CUDA devices.

    Args:
        device: save only this CUDA device. None: save all CUDA devices.
        generators: further generators to save, of Python, NumPy or torch.
    """

    def __init__(self, device: torch.device | None = None, generators: Sequence[Any] = ()) -> None:
        self._accesses = list(filter(None, map(state_access, generators)))
        self._generator_states = [get() for get, _ in self._accesses]
        self._numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
        self._python_state = random.getstate()
        self._numpy_state = self._numpy_random.get_state() if self._numpy_random else None
        self._cpu_state = torch.get_rng_state()
        devices = range(torch.cuda.device_count()) if device is None else [device] if device.type == "cuda" else []
        self._cuda_states = [(one, torch.cuda.get_rng_state(one)) for one in devices if torch.cuda.is_initialized()]

    def restore(self) -> None:
        """Restore the saved states."""
        random.setstate(self._python_state)
        if self._numpy_random:
            self._numpy_random.set_state(self._numpy_state)
        torch.set_rng_state(self._cpu_state)
        for device, state in self._cuda_states:
            torch.cuda.set_rng_state(state, device)
        for (_, put), state in zip(self._accesses, self._generator_states, strict=True):
            put(state)

    def state_dict(self) -> dict[str, Any]:
        """The states as tensors and plain values: further generators must be torch's; of CUDA only the first device."""
        version, words, gauss = self._python_state
        saved: dict[str, Any] = {"python": [version, torch.tensor(words), gauss], "cpu": self._cpu_state}
        if self._numpy_state is not None:
            kind, keys, *rest = self._numpy_state
            saved["numpy"] = [kind, torch.tensor(keys.tolist()), *rest]
        if self._cuda_states:
            saved["cuda"] = self._cuda_states[0][1]
        return saved | {"generators": self._generator_states}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the states from ``state_dict``. Missing entries stay as they are."""
        version, words, gauss = saved["python"]
        self._python_state = (version, tuple(words.tolist()), gauss)
        self._cpu_state = saved["cpu"]
        if "numpy" in saved and self._numpy_random:
            kind, keys, *rest = saved["numpy"]
            self._numpy_state = (kind, keys.numpy(), *rest)
        if "cuda" in saved:
            self._cuda_states = [(device, saved["cuda"]) for device, _ in self._cuda_states[:1]]
        if saved["generators"]:
            self._generator_states = saved["generators"]


class KeptTensors:
    """Copies of tensors on the same device. Copying does not wait for the device."""

    @torch.no_grad()
    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._copies = [part.clone() for part in self._parts()]

    @torch.no_grad()
    def save(self) -> None:
        """Copy the present values, in one operation."""
        parts = self._parts()
        if [one.shape for one in parts] != [one.shape for one in self._copies]:
            self._copies = [part.clone() for part in parts]
        elif parts:
            torch._foreach_copy_(self._copies, parts)  # pyright: ignore[reportPrivateImportUsage]

    def _parts(self) -> list[torch.Tensor]:
        return [part for tensor in self._tensors for part in plain_parts(tensor)]

    def changed(self) -> list[torch.Tensor]:
        """Return the tensors that differ from their copies, or contain a NaN.

        Version counters are no substitute: batch normalisation does not increase them.
        """
        whole = [tensor for tensor in self._tensors for _ in plain_parts(tensor)]
        both = zip(whole, self._parts(), self._copies, strict=True)
        return list({id(tensor): tensor for tensor, part, copied in both if not torch.equal(part, copied)}.values())

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the tensors from their copies, also their shapes: an observer of ranges has none at first."""
        for part, copied in zip(self._parts(), self._copies, strict=True):
            if part.shape != copied.shape:
                part.resize_(copied.shape)
            part.copy_(copied)


class UnchangedParameters:
    """Parameters, by name, with checksums: a step may write to them, unseen by autograd.

    For example to a teacher whose weights are an average of the student's. A cast to another type, which a layer does
    when it is first used, is no change: training would do it, too.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._before = [(name, one, one.dtype, _checksum(one)) for name, one in named]

    def first_changed(self) -> str:
        """The name of the first one whose values have changed, or ""."""
        same_type = ((name, one, checksum) for name, one, dtype, checksum in self._before if one.dtype == dtype)
        return next((name for name, one, checksum in same_type if _checksum(one) != checksum), "")


def _checksum(tensor: torch.Tensor) -> list[int]:
    """The sums of the bits of each plain tensor in ``tensor``, as integers."""
    return [_sum_of_bits(part.detach().contiguous()) for part in plain_parts(tensor)]


def _sum_of_bits(tensor: torch.Tensor) -> int:
    """Eight bytes are one integer, whose sum needs no memory: a sum of shorter ones would copy them to this type."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # the stride of a single element may be any number
    values = flat.view(torch.uint8)
    whole = values.numel() // 8 * 8
    eights, rest = values[:whole], values[whole:]
    if values.storage_offset() % 8:
        eights = eights.clone()
    return int(eights.view(torch.int64).sum()) + int(rest.sum())


class KeptBuffers:
    """The buffers and other tensors that are at ``places`` now, and copies of them on the same device.

    What cannot be refilled, such as an expanded or a sparse buffer, is put back as the same object. Changes of its
    values in place are not undone: a trial refuses them.

    Args:
        copies: has those of more than 1 MiB instead, such as quantized weights. None: all are on the device.
    """

    def __init__(self, places: Sequence[TensorPlace], copies: Copies | None = None) -> None:
        self._places = places
        is_kept = [one.costs_little or (copies is not None and one.tensor is not None) for one in places]
        self._buffers = [(place, place.tensor) for place in itertools.compress(places, is_kept)]
        self._not_kept = [place for place, one in zip(places, is_kept, strict=True) if not one]
        filled = (one for _, one in self._buffers if one is not None and can_be_refilled(one))
        tensors = {id(one): one for one in filled}.values()
        self._tensors = KeptTensors(one for one in tensors if copies is None or one.nbytes <= SMALL_BYTES)
        self._elsewhere: list[tuple[torch.Tensor, list[int], Restore]] = []
        if copies is not None:
            large = (one for one in tensors if one.nbytes > SMALL_BYTES)
            self._elsewhere = [(one, _checksum(one), copies.copy(one)) for one in large]

    def renewed(self) -> "KeptBuffers":
        """The buffers that are at the places now, with copies of their present values on the device."""
        is_new = any(place.tensor is not tensor for place, tensor in self._buffers)
        # Where there was None, or a tensor that is too large to keep in each step, may now be a small tensor.
        is_filled = any(holder.get(name) is not None for holder, name, _ in self._not_kept)
        if is_new or (is_filled and any(place.costs_little for place in self._not_kept)):
            return KeptBuffers(self._places)
        self._tensors.save()
        return self

    def that_may_change(self) -> list[TensorPlace]:
        """The places whose buffers have changed, and those of buffers up to 1 MiB, which may change later.

        Batch normalisation, for example, changes its buffers only in training mode. A large tensor in an attribute that
        has changed counts as a buffer from now on, if its shape is as before: an activation has that of its samples.
        """
        changed = {id(tensor) for tensor in self._tensors.changed()}
        changed |= {id(tensor) for tensor, before, _ in self._elsewhere if _checksum(tensor) != before}
        may_change = list[TensorPlace]()
        for place, tensor in self._buffers:
            now = place.tensor
            if tensor is None or not can_be_refilled(tensor) or tensor.nbytes <= SMALL_BYTES:
                may_change.append(place)
            elif now is not tensor or id(tensor) in changed:
                is_state = now is not None and now.is_leaf and now.shape == tensor.shape
                may_change.append(place._replace(is_state=place.is_state or is_state))
        return may_change + self._not_kept

    def restore(self) -> None:
        """Put the buffers back, with their values."""
        self.restore_on_device()
        for _, _, restore in self._elsewhere:
            restore()

    def restore_on_device(self) -> None:
        """Put the buffers back, and restore those that are copied on their device."""
        for place, tensor in self._buffers:
            place.put(tensor)
        self._tensors.restore()


def seed_everything(seed: int, generators: Sequence[Any] = ()) -> None:
    """Seed the random generators of Python, NumPy, the CPU and the CUDA devices, and ``generators``."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    for one in generators:
        if isinstance(one, torch.Generator):
            one.manual_seed(seed)
        elif hasattr(one, "bit_generator"):
            one.bit_generator.state = type(one.bit_generator)(seed).state
        else:
            one.seed(seed)

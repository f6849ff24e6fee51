"""The trial of a step: may its samples be cut into micro-batches, and may a micro-step run again?

Three small micro-steps tell: on one sample, on another one, and on both together. Gradients and results of both must be
the sum of those of each alone. If they are a multiple of it, as for a mean over samples, a trainer can scale its loss.
Otherwise the loss or a layer mixes the samples of a micro-batch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from torchtune_adaptive.engine.distributed.attributes import can_be_refilled
from torchtune_adaptive.engine.distributed.snapshot import RandomStates, seed_everything
from torchtune_adaptive.engine.loop import Loop, is_compiled, sum_of_results
from torchtune_adaptive.engine.memory.operations import OperationMode, plain_parts
from torchtune_adaptive.engine.recovery.columns import leaves
from torchtune_adaptive.engine.recovery.fixed_randomness import FixedRandomness
from torchtune_adaptive.errors import CannotCutError, InputError, cannot_recover, quote, reason_of

FACTORS = (1.0, 0.5, 2.0)  # of a sum, of a mean over samples, and of a sum that a trainer divides by all samples

_TOLERANCE = 1e-3  # of a norm, for float32
_ROUNDINGS = {"gradients": 8, "results": 2}  # of the least precise type
_LARGEST_TOLERANCE = 0.25  # with which a sum is still told from a mean
_CHUNK, _SUMS = 2**18, 64  # elements of a gradient, and how many sums stand for them
_MIXES = "the loss or a layer mixes the samples of a micro-batch"


@dataclass(frozen=True)
class Verdict:
    """What a trial has found. Equal on every rank.

    Attributes:
        factor: one of ``FACTORS``: the gradients of both samples are so many times the sum of each one's. None: not
            known, or there is a ``reason``.
        reason: why samples must not be cut into micro-batches, as part of a sentence, or "".
        counts: of each of the two samples, whether it has gradients that can be compared.
        is_random: whether a micro-step draws random numbers that a trial cannot fix, so that nothing is known.
        why_no_sum: why results are no sums even so, by far, or "".
    """

    factor: float | None = None
    reason: str = ""
    counts: tuple[bool, bool] = (True, True)
    is_random: bool = False
    why_no_sum: str = ""

    @property
    def may_be_random(self) -> bool:
        """Whether random numbers may be all that the reason has found."""
        return self.reason.startswith(_MIXES)


class ResultsError(InputError):
    """The results of micro-steps do not add up."""


@dataclass(eq=False)
class Trial:
    """Watches three micro-steps, and compares their gradients and results.

    Attributes:
        generators: random generators of one's own, from which a micro-step may draw.
        keeps_gradients: whether the gradients of a micro-step stay during the next one.
        has_earlier: whether those of the same three micro-steps are there before the first one.
        compares_results: whether results are compared.
        seed: of random numbers that are not fixed; None: as they would be.
        has_constant_noise: whether all random numbers of an operation are fixed to one value.
        mixing_layer: why samples must not be cut: a layer of this rank's has computed statistics over them; "" if none
            has.
    """

    loop: Loop
    _: KW_ONLY
    generators: Sequence[Any]
    has_earlier: bool
    compares_results: bool
    keeps_gradients: bool = False
    seed: int | None = None
    has_constant_noise: bool = False
    mixing_layer: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._randomness = FixedRandomness(is_constant=self.has_constant_noise)
        self._sums: list[torch.Tensor] = []  # of the gradients of each micro-step
        self._left: list[torch.Tensor] = []  # those that are there after each micro-step
        self._before: Any = 0  # those of all gradients before the next one
        self._results: list[Any] = []
        self._draws: list[int] = []  # of random numbers, by each micro-step

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Context of a micro-step, with fixed random numbers.

        Raises:
            CannotRecoverError: the micro-step changes a parameter or the state of an optimizer; before it does so.
        """
        states = RandomStates(self.loop.device, self.generators)
        attributes = {name: _attributes_of(one) for name, one in self.loop.model.named_parameters()}
        try:
            with ExitStack() as stack:
                for name, module in self.loop.model.named_modules():
                    if isinstance(module, _BatchNorm):
                        stack.callback(module.register_forward_pre_hook(self._noting(name)).remove)
                for name, parameter in self.loop.model.named_parameters():
                    if parameter.requires_grad and getattr(parameter, "_post_accumulate_grad_hooks", None):
                        last = parameter.register_post_accumulate_grad_hook(partial(_check_kept, name, parameter))
                        stack.callback(last.remove)
                stack.callback(register_optimizer_step_pre_hook(_refuse_step).remove)
                if self.seed is not None:
                    seed_everything(self.seed, self.generators)
                stack.enter_context(self._randomness)
                stack.enter_context(_Guard(_kept_tensors(self.loop.model, self.loop.optimizers)))
                before = self._randomness.draws
                yield
                self._draws.append(self._randomness.draws - before)
        finally:
            states.restore()
        for name, parameter in self.loop.model.named_parameters():
            before, after = attributes.get(name, {}), _attributes_of(parameter)
            if before.keys() != after.keys() or any(before[key] is not value for key, value in after.items()):
                raise cannot_recover(f"a micro-step puts tensors into attributes of the parameter `{name}`")

    def note(self, result: Any) -> None:
        """Note what a micro-step has added to the gradients, and its result."""
        before = self._before if self.keeps_gradients and self.is_finite else 0
        self.start_here()
        self._sums.append(self._before - before)
        self._left.append(self._before)
        self._results.append(result)

    @property
    def is_finite(self) -> bool:
        """Whether all gradients so far are finite, so that those of further micro-steps can be told from them."""
        return all(bool(one.isfinite().all()) for one in self._sums)

    def start_here(self) -> None:
        """Leave out what has been added to the gradients since the last micro-step."""
        self._before = _sums_of_gradients(self.loop.model, self.loop.device)

    def starts_finite(self) -> bool:
        """``start_here``, and tell whether what is left out is finite."""
        self.start_here()
        return bool(self._before.isfinite().all())

    def forget_earlier(self) -> None:
        """Compare the next micro-step from zero: the caller has dropped all gradients."""
        self._before, self.has_earlier = 0, False

    def verdict(self) -> Verdict:
        """Compare what was noted. A collective.

        Raises:
            ResultsError: results do not add up as gradients do. Raised on every rank.
        """
        consensus = self.loop.consensus
        if layer := consensus.first_reason(self.mixing_layer):
            return Verdict(reason=layer)
        one, other, both = self._first(), *self._sums[1:]
        distances = [(both - factor * (one + other)).square().sum().item() for factor in FACTORS]
        squares = [vector.square().sum().item() for vector in (one, other, both, one + other)]
        may_overflow = torch.float16 in self._randomness.dtypes  # until a gradient scaler has found its scale
        found = list(zip(*consensus.from_all_ranks((self._eps(), may_overflow, *squares, *distances)), strict=True))
        eps = max(found[0])
        norms = [math.sqrt(sum(column)) for column in found[2:]]
        if any(found[1]) and not math.isfinite(norms[2]):
            return Verdict(counts=(False, False))
        verdict = _compared(_tolerance(eps, "gradients"), norms[:4], norms[4:])
        if verdict.may_be_random and consensus.any_rank(self._drops_gradients(_tolerance(eps, "gradients"))):
            return Verdict(reason="a micro-step drops the gradients of the one before, or sets `.grad` itself")
        if verdict.factor is None or not self.compares_results:
            return verdict
        tolerance = _tolerance(eps, "results")
        if reason := consensus.first_reason(_why_no_sum(*self._results, factor=verdict.factor, tolerance=tolerance)):
            raise ResultsError(f"{reason}.")
        return verdict

    def draws_more_than(self, other: "Trial") -> bool:
        """Whether the first micro-step has drawn more random numbers than that of ``other``. A collective."""
        return self.loop.consensus.any_rank(self._draws[:1] > other._draws[:1])

    def random_verdict(self) -> Verdict:
        """The verdict on micro-steps that draw random numbers, whose gradients cannot be compared. A collective."""
        reason = _why_no_sum(*self._results, factor=1.0, tolerance=_LARGEST_TOLERANCE)
        return Verdict(is_random=True, why_no_sum=self.loop.consensus.first_reason(reason))

    def is_like(self, other: "Trial", *, exactly: bool = False) -> bool:
        """Whether both have seen the same gradients in their last micro-step. A collective.

        Args:
            exactly: but for the rounding of kernels that add in another order each time, and not of other batches.
        """
        distance = (self._sums[-1] - other._sums[-1]).norm().item()
        largest = max(sums.norm().item() for sums in self._sums)
        tolerance = self._eps() if exactly else _tolerance(self._eps(), "gradients")
        return not self.loop.consensus.any_rank(distance > tolerance * largest)

    def _first(self) -> torch.Tensor:
        """The sums of the gradients of the first micro-step."""
        if self.has_earlier and self.keeps_gradients:  # it added to the gradients of all three: g0 + (g0 + g1 + g2)
            return (self._sums[0] - self._sums[1] - self._sums[2]) / 2
        return self._sums[0]

    def _drops_gradients(self, tolerance: float) -> bool:
        """Whether only the gradients of the last micro-step are left, which has both samples."""
        one, other, both = self._left
        is_left = (both - one - other).norm() <= tolerance * both.norm()
        return self.keeps_gradients and not self.has_earlier and bool(is_left)

    def _eps(self) -> float:
        """The relative rounding error of the least precise type that micro-steps have computed in."""
        types = self._randomness.dtypes or {one.dtype for one in self.loop.model.parameters()}
        eps = max((torch.finfo(one).eps for one in types), default=0.0)
        if self.loop.device.type == "cuda" or is_compiled(self.loop.model):
            eps = max(eps, torch.finfo(torch.float16).eps)  # of TF32; what compiled code computes in is not seen
        return eps

    def _noting(self, name: str) -> Callable[[nn.Module, Any], None]:
        def note(module: nn.Module, _: Any) -> None:
            if not self.mixing_layer and (module.training or module.running_mean is None):
                kind = type(module).__name__
                self.mixing_layer = f"the layer `{name}` ({kind}) computes with statistics of the whole micro-batch"

        return note


def cannot_cut(reason: str) -> CannotCutError:
    """The error that samples must not be cut into micro-batches for ``reason``."""
    return CannotCutError(
        f"Samples must not be cut into micro-batches: {reason}. A search still works, and training in one micro-batch,"
        " without recovery."
    )


def _tolerance(eps: float, of_what: str) -> float:
    return min(max(_TOLERANCE, _ROUNDINGS[of_what] * eps), _LARGEST_TOLERANCE)


def _compared(tolerance: float, norms: Sequence[float], distances: Sequence[float]) -> Verdict:
    """The verdict on the norms of gradients, and on the distances of both samples' from ``FACTORS`` times the sum."""
    one, other, both, total = norms
    finite = [norm for norm in (one, other) if math.isfinite(norm)]
    if len(finite) == 2 and (not math.isfinite(both) or 0 < both >= max(finite) / tolerance):
        return Verdict(reason=f"{_MIXES}: two have other gradients together than each alone")
    if not finite and 0 < both < math.inf:  # such as a standard deviation, which one sample has not
        return Verdict(reason=f"{_MIXES}: two have gradients together, and none that are finite alone")
    smallest = tolerance * max(finite, default=0.0)
    counts = math.isfinite(one) and one > smallest, math.isfinite(other) and other > smallest
    if not all(counts):
        return Verdict(counts=counts)
    for factor, distance in zip(FACTORS, distances, strict=True):
        if distance <= tolerance * max(both, factor * total):
            return Verdict(factor)
    share = distances[0] / max(both, total)
    return Verdict(reason=f"{_MIXES}: the gradients of two together differ from the sum of each one's by {share:.1%}")


def _why_no_sum(one: Any, other: Any, both: Any, *, factor: float, tolerance: float) -> str:
    """Why the results of micro-steps do not add up as their gradients do, or ""."""
    try:
        total = sum_of_results(one, other)
    except (InputError, RuntimeError) as error:
        return reason_of(error)
    sums, found = list(leaves(total)), list(leaves(both))
    if type(total) is type(both) and len(sums) == len(found):
        pairs = [pair for pair in zip(sums, found, strict=True) if not _agrees(*pair, factor, tolerance)]
        if not pairs:
            return ""
        total, both = pairs[0]
    return (
        f"Results of micro-steps must add up, but two samples together have {_shown(both)}, and the sum of each alone"
        f" is {_shown(total)}"
    )


def _shown(value: Any) -> str:
    is_large = isinstance(value, torch.Tensor) and value.numel() > 1
    return f"a tensor of shape {tuple(value.shape)}" if is_large else quote(value)


def _agrees(total: Any, both: Any, factor: float, tolerance: float) -> bool:
    """Whether ``both`` is ``factor`` times ``total``. Counts are not scaled; other objects are not compared."""
    if not all(isinstance(value, torch.Tensor | int | float) for value in (total, both)):
        return True
    expected, found = (torch.as_tensor(value).detach().double().cpu() for value in (total, both))
    if expected.shape != found.shape:
        return False
    is_count = isinstance(both, int) or (isinstance(both, torch.Tensor) and not both.is_floating_point())
    if is_count:
        return factor != 1 or torch.equal(expected, found)
    distance, size = (found - factor * expected).norm().item(), max(found.norm().item(), expected.norm().item())
    return not math.isfinite(size) or distance <= tolerance * size


def _sums_of_gradients(model: nn.Module, device: torch.device) -> torch.Tensor:
    """Sums of all gradients [sums], with signs that are the same in each call: few numbers that are linear in them.

    Each is a sum of some elements with random signs, so that the norm of all sums is about that of the gradients.
    """
    seeded = torch.Generator("cpu").manual_seed(0)  # there may be another default device
    signs = torch.randint(2, (_CHUNK,), generator=seeded, dtype=torch.int8, device="cpu")
    signs = (2 * signs - 1).to(device, torch.float32)
    sums: list[torch.Tensor] = []
    with _disable_current_modes(), torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            gradient = parameter if parameter.grad is None else parameter.grad
            for part in map(_dense, plain_parts(gradient)):
                for chunk in part.detach().reshape(-1).split(_CHUNK):
                    if parameter.grad is None:
                        sums.append(torch.zeros(_SUMS, device="cpu"))
                        continue
                    chunk = chunk.to(device, torch.float32) * signs[: chunk.numel()]
                    padded = nn.functional.pad(chunk, (0, -chunk.numel() % _SUMS))
                    sums.append(padded.view(-1, _SUMS).sum(0))
    return torch.cat([one.double().cpu() for one in [torch.zeros(0, device="cpu"), *sums]])


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """As real numbers, all of which are in memory."""
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class _Guard(OperationMode):
    """Raises an error before an operation writes to one of ``tensors``, by their names.

    A layer may replace the memory of its parameter, as bitsandbytes does to cast a bias. The memory that it had is held
    meanwhile, so that no new tensor gets it.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self._held = [(name, _memory_of(one)) for name, one in tensors]  # so that no other gets the same number
        self._names = {memory._cdata: name for name, memory in self._held}

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = getattr(func, "_schema", None)  # flex attention, a higher-order operator, has none
        if schema and schema.is_mutable and schema.name != "aten::set_":  # of parametrizations; values stay
            for place, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._check(args[place] if place < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _check(self, written: Any) -> None:
        for one in written if isinstance(written, list | tuple) else (written,):
            name = self._names.get(_memory_of(one)._cdata) if isinstance(one, torch.Tensor) else None
            if name is not None:
                raise cannot_recover(f"a micro-step writes to {name}, which would happen twice if it ran again")


def _memory_of(tensor: torch.Tensor) -> Any:
    """The memory of a plain tensor; for a sparse one, which has several, the tensor itself."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else tensor


def _kept_tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a micro-step must not write to, with names: also buffers that could not be restored."""
    named: list[tuple[str, Any]] = [(f"the parameter `{name}`", one) for name, one in model.named_parameters()]
    named += [(f"the buffer `{name}`", one) for name, one in model.named_buffers() if not can_be_refilled(one)]
    for name, one in model.named_parameters():
        named += [(f"`{key}` of the parameter `{name}`", value) for key, value in _attributes_of(one).items()]
    for optimizer in optimizers:
        states = (value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values())
        named += [(f"the state of the optimizer {type(optimizer).__name__}", value) for value in states]
    tensors = ((name, value) for name, value in named if isinstance(value, torch.Tensor))
    return ((name, part) for name, value in tensors for part in plain_parts(value) if part.numel())


def _attributes_of(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """The tensors that a program has put into attributes of a parameter, as ``main_grad``.

    Those that a sharded one consists of are none.
    """
    values = vars(parameter).items()
    return {key: value for key, value in values if isinstance(value, torch.Tensor) and key != "_local_tensor"}


def _check_kept(name: str, parameter: torch.Tensor, _: object) -> None:
    """Called after all other hooks of a parameter, whose gradient has just been computed; with what they returned."""
    if parameter.grad is None:
        raise cannot_recover(f"a hook takes the gradient of `{name}` away in the backward pass")


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    raise cannot_recover(
        f"the optimizer {type(optimizer).__name__} steps within a micro-step or its backward pass, which may run again"
    )

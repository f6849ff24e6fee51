"""What a train step is: the contract that recipes, trainers and users' loops meet, and that search and plan take."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.fsdp_state import KeptSettings, fsdp_states, reset_after_failure
from torchtune_adaptive.engine.distributed.snapshot import UnchangedParameters, restore_on_exit
from torchtune_adaptive.engine.distributed.vote import Outcome, run_or_abort_together
from torchtune_adaptive.engine.memory.devices import meter_for
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.memory.out_of_memory import empty_cache, free_memory, only_new_garbage
from torchtune_adaptive.engine.optimizers import without_step_hooks
from torchtune_adaptive.engine.recovery.optimizer_state import allocate_state
from torchtune_adaptive.engine.references import Generators, modules_within_reach
from torchtune_adaptive.errors import InputError, quote

_COMPILED_SHAPES = 256  # more would have no effect: it is torch's `accumulated_recompile_limit`
_searches = 0  # within which this process is


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A train step, what it changes on the device, and the ranks that run it together.

    Attributes:
        model: all models on the device, several of them in an ``nn.ModuleList``.
        optimizers: all optimizers of the step.
        device: the device on which the model computes.
        micro_step: forward pass, loss and backward pass of one micro-batch. Its results can be summed.
        finish: what follows the last micro-step: clipping and the optimizers' steps. It takes the sum of the results.
        release: frees what a failed step holds outside of the model.
        consensus: the agreement between the ranks.
        meter: meters the device's memory; None if only a search needs that.
        state_comes_first: whether training creates the state of Adam and AdamW before its first step. A step would
            create it between blocks of its own, which the allocator then cannot free.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device
    micro_step: Callable[[Any], Any]
    finish: Callable[[Any], object] = lambda _: None
    release: Callable[[], object] = lambda: None
    consensus: Consensus
    meter: MemoryMeter | None = None
    state_comes_first: bool = False

    def step(self, micro_batches: Iterable[Any]) -> None:
        """One optimizer step, without recovery. It issues the same collectives on every rank."""
        self.finish(functools.reduce(sum_of_results, map(self.micro_step, micro_batches)))

    def modules(self) -> list[nn.Module]:
        """All modules whose buffers and attributes a step may change: also those that ``model`` lacks."""
        return modules_within_reach(self.model, self.micro_step)

    def generators(self, modules: Sequence[nn.Module]) -> Generators:
        """The random generators of one's own that a step may draw from: of ``modules``, and of ``micro_step``."""
        return Generators(self.micro_step, modules)

    def named_parameters(self, modules: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
        """The parameters of ``modules``; those that ``model`` lacks are named by the class of their module."""
        own = list(self.model.named_parameters())
        known = {id(parameter) for _, parameter in own}
        beside = (
            (f"{name} of {type(module).__name__}", parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in known
        )
        return own + list(beside)

    def meter_for_probes(self) -> MemoryMeter:
        """The meter; a new one if there is none."""
        return self.meter or meter_for(self.device, self.model, self.optimizers)

    @contextmanager
    def restored(self) -> Iterator[Callable[[], None]]:
        """Context: on exit, restore models, optimizers and random generators bit for bit, and set gradients to None.

        Steps within run no hooks of the optimizers: see ``without_step_hooks``. A collective. Yields a function that
        restores only the optimizers, for a step that failed while it created their state.

        Raises:
            InputError: an optimizer cannot be restored; or on exit, a step has changed parameters that are not.
        """
        compile_each_size()
        modules = self.modules()
        restored = {id(one) for one in self.model.parameters() if one.requires_grad}
        others = UnchangedParameters(one for one in self.named_parameters(modules) if id(one[1]) not in restored)
        with (
            _searching(),
            without_step_hooks(self.optimizers),
            restore_on_exit(self.model, self.optimizers, modules, self.generators(modules).now()) as restore_optimizers,
            only_new_garbage(),
        ):
            free_memory(self.device)  # free the allocator's cache after loading the model
            yield restore_optimizers
        if changed := self.consensus.first_reason(others.first_changed()):
            raise InputError(
                f"A step of the search has changed `{changed}`, which is not restored, as it needs no gradients or is"
                " not in `model`: load it again, and leave this update out of the step."
            )

    def create_states(self, context: AbstractContextManager[Any]) -> bool:
        """Create the state of Adam and AdamW, if it is not there, within ``context``. A collective.

        Returns whether it fits; otherwise a part of it may be left.
        """

        def create() -> None:
            with context:
                for optimizer in self.optimizers:
                    allocate_state(optimizer)

        return self.run_together(create)

    def run_together(self, work: Callable[[], object]) -> bool:
        """Run ``work`` with a vote of the ranks before each collective: see ``run_or_abort_together``. A collective.

        Returns whether memory sufficed on all ranks. If not, FSDP2's settings are as before; call ``clean_up``.
        """
        settings = KeptSettings(fsdp_states(self.model))
        is_done = run_or_abort_together(work, self.consensus) is Outcome.DONE
        if not is_done:
            settings.restore()
        return is_done

    def clean_up(self, *, has_garbage: bool = True) -> None:
        """Drop gradients and everything else that a step has left, whether it failed or not.

        Args:
            has_garbage: False saves time if no micro-step has run since the last call.
        """
        self.release()
        reset_after_failure(self.model)
        (free_memory if has_garbage else empty_cache)(self.device)


@contextmanager
def _searching() -> Iterator[None]:
    global _searches
    _searches += 1
    try:
        yield
    finally:
        _searches -= 1


def check_no_search() -> None:
    """Check that no search runs this code.

    Raises:
        InputError: a search does.
    """
    if _searches:
        raise InputError(
            "The train step of a search must not use a `RecoverableStep`, which survives the errors that a search looks"
            " for: call `micro_step` itself, twice."
        )


def is_compiled(model: nn.Module) -> bool:
    """Whether a module of ``model`` was compiled, in place or as a whole."""
    return any(one._compiled_call_impl is not None or hasattr(one, "_orig_mod") for one in model.modules())


def compile_each_size() -> None:
    """Let torch compile a function for 256 shapes; after 8 it would compile it for no other.

    Flex attention, and whatever is compiled with ``dynamic=False``, is compiled anew for each size of a batch, with
    LoRA even twice. Where flex attention is not compiled, it is several times slower and holds the scores of all pairs
    of tokens. The setting is torch's, for the whole process; a larger one is kept.
    """
    from torch._dynamo import config  # which takes a second to import

    config.recompile_limit = max(config.recompile_limit, _COMPILED_SHAPES)


def sum_of_results(one: Any, other: Any) -> Any:
    """The sum of two results of micro-steps, elementwise for tuples and dicts.

    What is None, or a name that a dict lacks, adds nothing.

    Raises:
        InputError: they cannot be summed.
    """
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict):
        total = copy.copy(one)  # of the same type, such as `collections.Counter`
        for name, value in other.items():
            total[name] = sum_of_results(one.get(name), value)
        return total
    if isinstance(one, tuple):
        if len(one) != len(other):
            raise InputError(f"`micro_step` has returned tuples of {len(one)} and of {len(other)} values.")
        sums = map(sum_of_results, one, other)
        return getattr(type(one), "_make", tuple)(sums)  # of a named tuple
    try:
        if isinstance(one, str | bytes):
            raise TypeError
        return one + other
    except TypeError:
        raise InputError(
            f"Results of micro-steps must have a sum, but {quote(one)} and {quote(other)} have none."
        ) from None

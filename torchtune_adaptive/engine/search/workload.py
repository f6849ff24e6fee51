"""The train step that a search runs, and the state that it must restore."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.engine.compiled import compile_each_size
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.fsdp_state import reset_after_failure
from torchtune_adaptive.engine.distributed.snapshot import UnchangedParameters, restore_on_exit
from torchtune_adaptive.engine.distributed.vote import Outcome, run_or_abort_together
from torchtune_adaptive.engine.memory.devices import meter_for
from torchtune_adaptive.engine.memory.meter import MemoryMeter
from torchtune_adaptive.engine.memory.out_of_memory import free_memory, only_new_garbage
from torchtune_adaptive.engine.optimizers import without_step_hooks
from torchtune_adaptive.engine.recovery.optimizer_state import allocate_state
from torchtune_adaptive.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A train step, with all state on the device that it may change.

    Attributes:
        train_step: a whole train step on a batch; it issues the same collectives on every rank.
        model: all models on the device, several of them in an ``nn.ModuleList``.
        optimizers: all optimizers of the step.
        device: the device on which the model computes.
        meter: the device's meter; None if only a search needs one.
        consensus: the agreement between the ranks that run the step together.
        release: frees memory that a failed step holds outside of the model.
        state_comes_first: whether training creates the state of Adam and AdamW before its first step. A step would
            create it between blocks of its own, which the allocator then cannot free.
    """

    train_step: Callable[[Any], object]
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device
    meter: MemoryMeter | None
    consensus: Consensus
    release: Callable[[], object] = lambda: None
    state_comes_first: bool = False

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
        frozen = UnchangedParameters(self.model, are_trained=False)
        with (
            without_step_hooks(self.optimizers),
            restore_on_exit(self.model, self.optimizers) as restore_optimizers,
            only_new_garbage(),
        ):
            free_memory(self.device)  # free the allocator's cache after loading the model
            yield restore_optimizers
        if changed := self.consensus.first_reason(frozen.first_changed()):
            raise InputError(
                f"A step of the search must not change `{changed}`, which needs no gradients and so is not restored,"
                " but it did: load the model again, and leave this update out of `train_step`."
            )

    def create_states(self, meter: MemoryMeter) -> bool:
        """Create the state that optimizers lack. A collective.

        Returns whether it fits; otherwise a part of it may be left.
        """

        def create() -> None:
            with meter:
                for optimizer in self.optimizers:
                    allocate_state(optimizer)

        return run_or_abort_together(create, self.consensus) is Outcome.DONE

    def clean_up(self) -> None:
        """Drop gradients and everything else that a step has left, whether it failed or not."""
        self.release()
        reset_after_failure(self.model)
        free_memory(self.device)

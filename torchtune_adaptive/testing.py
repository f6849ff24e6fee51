"""Inject faults, to test that training recovers from out of memory at any operation, on any rank.

    class MyRecipe(AdaptiveFullFinetuneRecipeDistributed): ...

    faults = {(20, 0): Fault(300, ranks=[1]), (40, 1): Fault(0, ranks=[0], kind="all-gather allocation")}
    with faults_in(MyRecipe, faults):
        run_recipe(MyRecipe, cfg)  # optimizer steps 20 and 40, counted from 0, run again with smaller micro-batches

A ``Fault`` can be used around any other code too: ``with Fault(3): loss.backward()``.
"""

import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn
from unittest import mock

import torch
import torch.distributed as dist

from torchtune_adaptive.engine.distributed.fsdp_ledger import RecordedAllGather
from torchtune_adaptive.engine.distributed.ledger import Ledger
from torchtune_adaptive.engine.memory.operations import OperationMode, is_collective, is_wait
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery.micro_steps import MicroStep

__all__ = ["Fault", "faults_in", "kill_process", "out_of_memory", "wrap_micro_steps"]

Kind = Literal["operation", "storage growth", "all-gather allocation", "collective"]


def out_of_memory() -> NoReturn:
    """Raise the error that the allocator raises."""
    raise torch.OutOfMemoryError("CUDA out of memory (a fault on purpose)")


def kill_process() -> None:
    """Kill this process without any clean-up, as the system's out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


class Fault(OperationMode):
    """Raises an error once within ``with fault:``, instead of occurrence number ``place`` (from 0).

    Threads of the backward pass count, but not those that the code within starts itself.

    An occurrence is, by ``kind``:
    - "operation": an operation on plain tensors, including those of FSDP2, or the growth of a storage. Collectives and
      operations within them do not count.
    - "storage growth": the growth of a storage, by which FSDP2 allocates gathered parameters.
    - "all-gather allocation": the allocation of FSDP2's buffer for an all-gather, if recovery is on.
    - "collective": a collective. The fault strikes before it is issued, which its caller cannot know.

    Args:
        place: number of the occurrence; None: the fault never strikes, it only counts.
        ranks: ranks of the default process group on which it strikes; None: every rank.
        phase: count only in this phase of a train step, for example "backward", entered within the context.
        strike: the fault: ``out_of_memory``, ``kill_process``, or any other function.

    Attributes:
        count: number of occurrences so far.
        has_struck: whether the fault has struck.

    >>> with Fault(None) as fault:
    ...     total = torch.ones(3) + torch.ones(3)
    >>> fault.count, fault.has_struck
    (3, False)
    """

    def __init__(
        self,
        place: int | None,
        *,
        ranks: Collection[int] | None = None,
        kind: Kind = "operation",
        phase: str | None = None,
        strike: Callable[[], object] = out_of_memory,
    ) -> None:
        super().__init__()
        self.count = 0
        self.has_struck = False
        self._phase_now = ""
        self._place = place
        self._ranks = ranks
        self._kind = kind
        self._phase = phase
        self._strike = strike
        self._is_active = False
        self._is_in_collective = False
        self._patches = ExitStack()

    def __enter__(self) -> "Fault":
        if self._is_active:
            raise RuntimeError("a fault must not be entered while it is active")
        self._is_active = True
        resize = torch.UntypedStorage.resize_  # not visible to dispatch modes

        def resize_and_count(storage: torch.UntypedStorage, nbytes: int) -> Any:
            if nbytes > storage.nbytes():
                self._happens("storage growth", "operation")
            return resize(storage, nbytes)

        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_and_count))
        for name, is_under_way in (("issuing", True), ("record", False), ("begin", False)):
            self._patches.enter_context(mock.patch.object(Ledger, name, self._noting(name, is_under_way)))
        allocate, enter = RecordedAllGather.allocate, Phases.enter

        def allocate_and_count(communicator: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._happens("all-gather allocation")
            return allocate(communicator, *args, **kwargs)

        def enter_and_note(phases: Phases, name: str) -> None:
            enter(phases, name)
            self._phase_now = name

        self._patches.enter_context(mock.patch.object(RecordedAllGather, "allocate", allocate_and_count))
        self._patches.enter_context(mock.patch.object(Phases, "enter", enter_and_note))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        self._is_active = False

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_collective(func):
            self._happens("operation")
        elif not is_wait(func):
            self._happens("collective")
        return func(*args, **kwargs)

    def _noting(self, name: str, is_under_way: bool) -> Callable[..., Any]:
        """The ledger's method ``name``, wrapped to track whether a collective is in progress."""
        method = getattr(Ledger, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            method(*args, **kwargs)
            self._is_in_collective = is_under_way

        return noted

    def _happens(self, *kinds: Kind) -> None:
        if self._kind not in kinds or (self._is_in_collective and self._kind != "collective"):
            return
        if self._phase not in (None, self._phase_now):
            return
        self.count += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.count - 1 == self._place and (self._ranks is None or rank in self._ranks):
            self.has_struck = True
            self._strike()


def wrap_micro_steps(step: Any, around: Callable[[int, Callable[[], Any]], Any] | None) -> None:
    """Run every micro-step of ``step``, a ``RecoverableStep``, through ``around(number, run)``. None: run it directly.

    Numbers count from 0 in each optimizer step, and continue when the step runs again.
    """
    maker = step._micro_steps
    vars(maker).pop("of", None)
    if around is None:
        return
    of, counted, count = maker.of, None, 0

    def wrapped(micro_batches: Any) -> list[MicroStep[Any]]:
        nonlocal counted, count
        if step._number != counted:
            counted, count = step._number, 0
        runs = of(micro_batches)
        first, count = count, count + len(runs)
        return [replace(one, run=partial(around, number, one.run)) for number, one in enumerate(runs, first)]

    maker.of = wrapped


@contextmanager
def faults_in(recipe_class: Any, faults: Mapping[tuple[int, int], Fault]) -> Iterator[None]:
    """Context: training with ``recipe_class`` has these faults. Key (20, 1) is the second micro-step of step 20.

    Steps and micro-steps are counted from 0. If a step runs again, its micro-steps continue the count, on every rank.
    Searches and dry runs have no faults.
    """
    train = recipe_class.train

    def train_with_faults(recipe: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = recipe.trainer

        def run(number: int, micro_step: Callable[[], Any]) -> Any:
            with faults.get((trainer.global_step, number)) or nullcontext():
                return micro_step()

        wrap_micro_steps(trainer.recoverable, run)
        return train(recipe, *args, **kwargs)

    with mock.patch.object(recipe_class, "train", train_with_faults):
        yield

"""The micro-batch of a trainer, and gradient checkpointing: the largest that fits, or what is fastest."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torchtune_adaptive.engine.search.any_loop import find_max_batch_size
from torchtune_adaptive.engine.search.fastest_step import find_fastest
from torchtune_adaptive.engine.search.strategies import SearchResult
from torchtune_adaptive.errors import NothingFitsError
from torchtune_adaptive.integrations.batches import TrainerBatches, rounded_down
from torchtune_adaptive.integrations.checkpointing import Checkpointing, ChosenCheckpointing
from torchtune_adaptive.integrations.trainer_batch import TrainerBatch
from torchtune_adaptive.integrations.worst_batches import WorstBatches, worst_batches
from torchtune_adaptive.text import count_text

log = logging.getLogger(__name__)
_MOST_HALVINGS = 4  # of a size that fits, which are timed

WholeStep = Callable[[Sequence[TrainerBatch]], torch.Tensor]


class MicroBatchSearch:
    """Finds the size of micro-batches by whole optimizer steps. They leave no trace in the trainer. All ranks together.

    Args:
        trainer: the trainer, of which public attributes are read.
        model: everything on the device.
        whole_step: runs an optimizer step of these micro-batches without recovery, and returns the sum of its losses.
        release: undoes what a failed step has changed in the trainer.
        cutter: cuts batches into micro-batches. The search sets its size.
        batches: those of the first optimizer step.
        memory_limit: as that of the trainer.
    """

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        whole_step: WholeStep,
        *,
        release: Callable[[], object],
        cutter: TrainerBatches,
        batches: Sequence[TrainerBatch],
        memory_limit: int | str | None,
    ) -> None:
        self._whole_step = whole_step
        self._release = release
        self._cutter = cutter
        self._batches = batches
        self._own_size = trainer.args.per_device_train_batch_size
        self._options = {"model": model, "optimizer": trainer.optimizer.optimizer, "memory_limit": memory_limit}
        cutter.size = max(cutter.size, cutter.num_to_try(batches))
        loader, shows_progress = trainer.callback_handler.train_dataloader, trainer.is_world_process_zero()
        self._worst: WorstBatches
        self._worst, most = worst_batches(loader, batches, cutter, shows_progress=shows_progress)
        own = [len(self._worst), most, cutter.largest_batch(batches)]
        of_ranks = trainer.accelerator.gather(torch.tensor([own], device=trainer.args.device))
        # Every rank runs and chooses the same.
        self._num_batches, self._most, self._largest_batch = of_ranks.amax(dim=0).tolist()

    def largest(self) -> int:
        """The largest size that fits, if need be rounded down to whole batches.

        Raises:
            NothingFitsError: a single sample does not fit.
        """
        found = self._find_largest()
        size = self._rounded(found.batch_size)
        log.info("The micro-batch has %d samples: %s", size, found)
        return size

    def fastest(self, model: nn.Module, chosen: ChosenCheckpointing) -> int:
        """Choose the fastest way to checkpoint ``model``, and return the fastest size with it.

        Raises:
            NothingFitsError: not one row fits, however much is checkpointed.
        """
        choices: dict[str, tuple[Checkpointing, int]] = {}
        is_short, why_none = False, ""
        for way in chosen.ways_of(model):
            if way.needs_less and not is_short:
                continue
            chosen.choose(way)
            try:
                found = self._find_largest()
            except NothingFitsError as error:
                is_short, why_none = True, str(error)
                continue
            is_short = found.exact_batch_size < found.bound
            for size in self._sizes_to_time(found.batch_size):
                choices[f"{count_text(size, 'sample')}, {way.words}"] = way, size
        if not choices:
            raise NothingFitsError(why_none)

        def step_of(choice: tuple[Checkpointing, int], given: Sequence[TrainerBatch]) -> torch.Tensor:
            way, self._cutter.size = choice
            chosen.choose(way)
            return self._whole_step(self._cutter.cut(given))

        fastest = find_fastest(
            {name: partial(step_of, choice) for name, choice in choices.items()},
            [self._batches],
            tolerance=math.inf,  # dropout draws other numbers; the trial of a step compares losses and gradients
            **self._options,
        )
        log.info("The fastest is %s:\n%s", fastest.name, fastest)
        way, size = choices[fastest.name]
        chosen.choose(way)
        return size

    def _find_largest(self) -> SearchResult:
        def step_of_worst(batches: list[TrainerBatch]) -> None:
            for batch in batches:
                self._whole_step([batch, batch])  # the second needs more memory: gradients exist

        try:
            return find_max_batch_size(
                step_of_worst,
                lambda num_samples: self._worst.of(num_samples, self._num_batches),
                max_batch_size=self._most,
                **self._options,
            )
        finally:
            self._release()

    def _rounded(self, size: int) -> int:
        return rounded_down(size, largest_batch=self._largest_batch)

    def _sizes_to_time(self, largest: int) -> list[int]:
        own = [self._own_size] if self._own_size <= largest else []  # the trainer's own is the simplest
        halves = [self._rounded(largest // 2**times) for times in range(_MOST_HALVINGS)]
        return list(dict.fromkeys(filter(None, own + halves)))

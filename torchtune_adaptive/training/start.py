"""Where a run starts: with the batch size of the search or the config, or at the saved position."""

from dataclasses import dataclass

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.training.batch.growth import BatchGrowth
from torchtune_adaptive.training.batch.loader import StepLoader
from torchtune_adaptive.training.run_state import AdaptiveState
from torchtune_adaptive.training.sizes import Sizes


@dataclass(frozen=True)
class StartingPoint:
    """Where a run starts or resumes.

    Attributes:
        batch_size: the current batch size.
        steps_done: optimizer steps done.
        schedule_steps: steps per epoch for which the learning rate schedule is built.
        epoch_steps: the part of ``steps_done`` in the current epoch.
    """

    batch_size: int
    steps_done: int
    schedule_steps: int
    epoch_steps: int = 0


def starting_point(
    loader: StepLoader,
    growth: BatchGrowth,
    sizes: Sizes,
    *,
    settings: AdaptiveSettings,
    epochs_run: int,
    saved: AdaptiveState | None,
) -> StartingPoint:
    """Where a run starts. If the batch may grow, a collective: the user's function is called for every epoch.

    Args:
        loader: the loader as configured; its batch size is not changed.
        growth: its maximum is set here.
        epochs_run: epochs done before a resume.
        saved: the saved state, None if a stock recipe wrote the checkpoint.

    Raises:
        InputError: the config's batch size does not fit, or the function returns an invalid answer.
    """
    chooses = settings.use_maximum_batch_size and not loader.is_global  # otherwise only micro-batches
    first = sizes.fitting_rows if chooses and sizes.fitting_rows is not None else loader.batch_size
    growth.maximum = _largest_batch_size(loader, sizes, first, settings)
    planned = growth.sizes(first)
    if saved is None:
        present = planned[epochs_run - 1] if epochs_run else first
        steps_done = sum(map(loader.steps_per_epoch_at, planned[:epochs_run]))
        return StartingPoint(present, steps_done, loader.steps_per_epoch_at(first))
    follows = growth.grows or (chooses and saved.config.get("use_maximum_batch_size", False))
    follows = follows and saved.is_global == loader.is_global
    last_epoch = epochs_run if saved.epoch_samples else epochs_run - 1
    present = saved.batch_size if follows else planned[last_epoch]
    epoch_steps = loader.steps_in(saved.epoch_samples, batch_size=present)
    return StartingPoint(present, saved.global_step, saved.schedule_steps, epoch_steps)


def _largest_batch_size(loader: StepLoader, sizes: Sizes, first: int, settings: AdaptiveSettings) -> int:
    """The largest batch size that may be reached from ``first``."""
    largest, limit, result = loader.largest_batch_size, settings.growth_limit, sizes.result
    if isinstance(limit, int):
        return min(limit, largest)
    if limit == "none" or result is None:
        return largest
    if settings.batch_increase_function is not None and first > result.exact_batch_size:
        at_bound = result.exact_batch_size == result.bound
        what = "that the data set and max_batch_size allow" if at_bound else "that fits"
        raise InputError(
            f"`batch_size` must be at most the largest {what} ({result.exact_batch_size}), but is {first} instead."
        )
    return result.batch_size

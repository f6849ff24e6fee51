"""A batch size that follows the gradient noise scale, as training measures it.

The simple noise scale of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training"
(https://arxiv.org/abs/1812.06162), is ``tr(covariance of a sample's gradient) / |mean gradient|**2``, in samples. Well
below it twice the batch halves the steps that are needed, well above it a larger batch is wasted. Their appendix A.1
estimates both parts from the norms of gradients over a small and a large batch.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torchtune_adaptive.errors import InputError, quote, require_integer


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of the mean gradient over ``small_samples`` of an optimizer step's samples, and over all of them.

    ``samples`` and ``small_samples`` are counted over all ranks.
    """

    small_samples: int
    small_norm_squared: float
    samples: int
    norm_squared: float

    def squared_mean(self) -> float:
        """An unbiased estimate of the squared norm of the mean gradient over all data; may be below 0."""
        weighted = self.samples * self.norm_squared - self.small_samples * self.small_norm_squared
        return weighted / (self.samples - self.small_samples)

    def trace_of_covariance(self) -> float:
        """An unbiased estimate of the trace of the covariance of single samples' gradients; may be below 0."""
        return (self.small_norm_squared - self.norm_squared) / (1 / self.small_samples - 1 / self.samples)


class MeasuredSchedule(ABC):
    """A ``batch_increase_function`` that is given gradient norms measured in training.

    An increase beyond the maximum is cut to it. That of a plain function would be refused as a whole.

    Attributes:
        every_steps: every how many optimizer steps one is measured. A measured step has at least two micro-steps and
            takes two more passes over the gradients; it needs no more collectives.
    """

    every_steps: int = 1

    @abstractmethod
    def observe(self, norms: GradientNorms) -> None:
        """Receive the norms of a measured step, which are the same on every rank."""

    @abstractmethod
    def __call__(self, epoch: int, current_batch_size: int) -> int:
        """The increase for ``epoch``. Called on rank 0 only."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Figures for the log, by name."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, as JSON can hold it."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""


class gradient_noise_scale(MeasuredSchedule):
    """Grows the batch toward the simple noise scale, by ``max_factor`` at most from one epoch to the next.

    Both parts of the noise scale are averaged over the measured steps with weights that fall by ``smoothing`` from each
    to the one before it. Until ``min_measurements`` have been made the batch stays. If the noise hides the mean
    gradient altogether, the noise scale counts as infinite.

    Args:
        max_factor: above 1; a batch may always grow by one.
        every_steps: measure every so many optimizer steps.
        smoothing: in [0, 1). A reading is noisy, and a batch that has grown too far does not shrink again.
        min_measurements: at least 1.

    Raises:
        InputError: an argument is out of its range.

    >>> schedule = gradient_noise_scale(max_factor=8, min_measurements=1)
    >>> schedule.observe(GradientNorms(small_samples=4, small_norm_squared=11.0, samples=8, norm_squared=6.0))
    >>> schedule.noise_scale, schedule(1, 8)  # trace 40, squared mean 1
    (40.0, 32)
    """

    def __init__(
        self, *, max_factor: float = 2.0, every_steps: int = 4, smoothing: float = 0.99, min_measurements: int = 8
    ) -> None:
        if not _is_number(max_factor) or not 1 < max_factor < math.inf:
            raise InputError(f"`max_factor` must be above 1 and finite, but is {quote(max_factor)} instead.")
        if not _is_number(smoothing) or not 0 <= smoothing < 1:
            raise InputError(f"`smoothing` must be in [0, 1), but is {quote(smoothing)} instead.")
        self.max_factor, self.smoothing = float(max_factor), float(smoothing)
        self.every_steps = require_integer("every_steps", every_steps, minimum=1)
        self.min_measurements = require_integer("min_measurements", min_measurements, minimum=1)
        self._measurements = 0
        self._samples = 0
        self._trace = 0.0
        self._squared_mean = 0.0

    @property
    def noise_scale(self) -> float | None:
        """In samples per optimizer step over all ranks; None before the first measurement, infinite if hidden."""
        if not self._measurements:
            return None
        # The averages start at 0, which both underestimate by the same factor: it cancels.
        return max(self._trace, 0.0) / self._squared_mean if self._squared_mean > 0 else math.inf

    def observe(self, norms: GradientNorms) -> None:
        if not math.isfinite(norms.small_norm_squared + norms.norm_squared):
            return  # an overflow, of which the average would never recover
        weight = 1 - self.smoothing
        self._trace = self.smoothing * self._trace + weight * norms.trace_of_covariance()
        self._squared_mean = self.smoothing * self._squared_mean + weight * norms.squared_mean()
        self._measurements += 1
        self._samples = norms.samples

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        noise_scale = self.noise_scale
        if noise_scale is None or self._measurements < self.min_measurements:
            return 0
        # The noise scale counts samples over all ranks and micro-steps, `current_batch_size` perhaps of one of each.
        wanted = current_batch_size * min(noise_scale / self._samples, max(self.max_factor, 1 + 1 / current_batch_size))
        return max(0, math.floor(wanted) - current_batch_size)

    def figures(self) -> dict[str, float]:
        return {} if self.noise_scale is None else {"gradient_noise_scale": self.noise_scale}

    def state_dict(self) -> dict[str, Any]:
        return {
            "measurements": self._measurements,
            "samples": self._samples,
            "trace": self._trace,
            "squared_mean": self._squared_mean,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._measurements, self._samples = state["measurements"], state["samples"]
        self._trace, self._squared_mean = state["trace"], state["squared_mean"]

    def __repr__(self) -> str:
        return (
            f"gradient_noise_scale(max_factor={self.max_factor:g}, every_steps={self.every_steps},"
            f" smoothing={self.smoothing:g}, min_measurements={self.min_measurements})"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

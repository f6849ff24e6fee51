"""Built-in functions for the config key ``batch_increase_function``.

Each is called as ``function(epoch, current_batch_size)`` at the start of an epoch, and returns the increase of the
batch size. Epochs count from 0.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtune_adaptive.errors import InputError, is_number, quote, require_fraction, require_integer

__all__ = ["at_epochs", "geometric", "gradient_noise_scale", "linear"]


@dataclass(frozen=True)
class at_epochs:
    """Adds ``increases[epoch]`` to the batch size. Epochs count from 0; increases must be integers of at least 0.

    >>> at_epochs({1: 8, "3": 16})(3, 24)
    16
    """

    increases: Mapping[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.increases, Mapping) or not self.increases:
            raise InputError(f"`increases` must map epochs to increases, but is {quote(self.increases)} instead.")
        checked: dict[int, int] = {}
        for key, value in self.increases.items():
            number: object = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
            epoch = require_integer("epoch of increases", number, minimum=0)
            if epoch in checked:
                raise InputError(f"`increases` names epoch {epoch} twice: {quote(self.increases)}.")
            checked[epoch] = require_integer(f"increases[{epoch}]", value, minimum=0)
        object.__setattr__(self, "increases", checked)

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        return self.increases.get(epoch, 0)


@dataclass(frozen=True)
class geometric:
    """Multiplies the batch size by ``factor`` (at least 2) every ``every_epochs`` epochs, but not at epoch 0.

    >>> [geometric(factor=2, every_epochs=2)(epoch, 8) for epoch in range(5)]
    [0, 0, 8, 0, 8]
    """

    factor: int = 2
    every_epochs: int = 1

    def __post_init__(self) -> None:
        require_integer("factor", self.factor, minimum=2)
        require_integer("every_epochs", self.every_epochs, minimum=1)

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        return (self.factor - 1) * current_batch_size if epoch > 0 and epoch % self.every_epochs == 0 else 0


@dataclass(frozen=True)
class linear:
    """Adds ``increment`` to the batch size every ``every_epochs`` epochs, but not at epoch 0."""

    increment: int
    every_epochs: int = 1

    def __post_init__(self) -> None:
        require_integer("increment", self.increment, minimum=0)
        require_integer("every_epochs", self.every_epochs, minimum=1)

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        return self.increment if epoch > 0 and epoch % self.every_epochs == 0 else 0


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of the mean gradient, over ``small_samples`` of an optimizer step's samples and over all of them.

    The small batch is the first half of each rank's samples. They are in random order, so that each half is a random
    sample, however it is cut into micro-batches. Samples are counted over all ranks.
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

    An increase above the maximum is reduced to it, while that of a plain function is refused.

    Attributes:
        every_steps: number of optimizer steps from one measurement to the next. A measured step has at least two
            micro-steps, and needs two more passes over the gradients, but no further collectives.
        samples_per_unit: samples of an optimizer step over all ranks, per unit of the batch size. The recipe sets it.
    """

    every_steps: int = 1
    samples_per_unit: int = 1

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
        """The state for a resumed run, as JSON values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""


class gradient_noise_scale(MeasuredSchedule):
    """Grows the batch towards the noise scale of its gradients, by at most a factor of ``max_factor`` per epoch.

    Both parts of the noise scale are exponential moving averages over the measured steps, with decay ``smoothing``.
    The batch does not grow before ``min_measurements`` measurements. If the estimated norm of the mean gradient is not
    above zero, the noise scale is infinite.

    The simple noise scale of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training"
    (https://arxiv.org/abs/1812.06162), is ``tr(covariance of a sample's gradient) / |mean gradient|**2``, in samples.
    Far below it, doubling the batch halves the number of steps needed. Far above it, a larger batch brings little.
    Appendix A.1 of the paper estimates both parts from the norms of gradients over a small and a large batch.

    Args:
        max_factor: above 1. A batch may always grow by one sample.
        every_steps: optimizer steps from one measurement to the next.
        smoothing: in [0, 1). Single measurements are noisy, and a batch never shrinks.
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
        if not is_number(max_factor) or not 1 < max_factor < math.inf:
            raise InputError(f"`max_factor` must be above 1 and finite, but is {quote(max_factor)} instead.")
        require_fraction("smoothing", smoothing)
        self.max_factor, self.smoothing = float(max_factor), float(smoothing)
        self.every_steps = require_integer("every_steps", every_steps, minimum=1)
        self.min_measurements = require_integer("min_measurements", min_measurements, minimum=1)
        self._measurements = 0
        self._trace = 0.0
        self._squared_mean = 0.0

    @property
    def noise_scale(self) -> float | None:
        """Samples per optimizer step over all ranks; None before the first measurement, infinite if noise dominates."""
        if not self._measurements:
            return None
        # Both averages start at 0 and are too low by the same factor, which cancels.
        return max(self._trace, 0.0) / self._squared_mean if self._squared_mean > 0 else math.inf

    def observe(self, norms: GradientNorms) -> None:
        if not math.isfinite(norms.small_norm_squared + norms.norm_squared):
            return  # after an overflow the average would never recover
        weight = 1 - self.smoothing
        self._trace = self.smoothing * self._trace + weight * norms.trace_of_covariance()
        self._squared_mean = self.smoothing * self._squared_mean + weight * norms.squared_mean()
        self._measurements += 1

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        noise_scale = self.noise_scale
        if noise_scale is None or self._measurements < self.min_measurements:
            return 0
        most = max(current_batch_size * self.max_factor, current_batch_size + 1)
        return max(0, math.floor(min(noise_scale / self.samples_per_unit, most)) - current_batch_size)

    def figures(self) -> dict[str, float]:
        return {} if self.noise_scale is None else {"gradient_noise_scale": self.noise_scale}

    def state_dict(self) -> dict[str, Any]:
        return {"measurements": self._measurements, "trace": self._trace, "squared_mean": self._squared_mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._measurements = state["measurements"]
        self._trace, self._squared_mean = state["trace"], state["squared_mean"]

    def __repr__(self) -> str:
        return (
            f"gradient_noise_scale(max_factor={self.max_factor:g}, every_steps={self.every_steps},"
            f" smoothing={self.smoothing:g}, min_measurements={self.min_measurements})"
        )

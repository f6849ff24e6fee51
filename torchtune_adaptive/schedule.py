"""Built-in functions for the config key ``batch_increase_function``.

Each is called as ``function(epoch, current_batch_size)`` at the start of an epoch, and returns the increase of the
batch size. Epochs count from 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtune_adaptive.errors import InputError, quote, require_integer
from torchtune_adaptive.training.batch.noise_scale import gradient_noise_scale

__all__ = ["at_epochs", "geometric", "gradient_noise_scale", "linear"]


@dataclass(frozen=True)
class at_epochs:
    """Grows by ``increases[epoch]`` samples. Epochs count from 0; increases must be integers of at least 0.

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
                raise InputError(f"`increases` must name epoch {epoch} once, but is {quote(self.increases)} instead.")
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
    """Adds ``increment`` samples every ``every_epochs`` epochs, but not at epoch 0."""

    increment: int
    every_epochs: int = 1

    def __post_init__(self) -> None:
        require_integer("increment", self.increment, minimum=0)
        require_integer("every_epochs", self.every_epochs, minimum=1)

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        return self.increment if epoch > 0 and epoch % self.every_epochs == 0 else 0

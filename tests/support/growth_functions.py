"""Functions that a config can name as `batch_increase_function`."""

from dataclasses import replace
from typing import Any

from torchtune_adaptive.schedule import GradientNorms, MeasuredSchedule, gradient_noise_scale


def raises_late(epoch: int, current_batch_size: int) -> int:
    if epoch == 2:
        raise ZeroDivisionError("division by zero")
    return 0


class Recording(MeasuredSchedule):
    """Records the norms of every step, and never grows. The last one made is ``Recording.last``."""

    last: "Recording"
    every_steps = 1

    def __init__(self) -> None:
        self.seen: list[GradientNorms] = []
        Recording.last = self

    def observe(self, norms: GradientNorms) -> None:
        self.seen.append(norms)

    def __call__(self, epoch: int, current_batch_size: int) -> int:
        return 0

    def figures(self) -> dict[str, float]:
        return {"seen": float(len(self.seen))}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Noisy(gradient_noise_scale):
    """Measures ten times the noise that there is, so that the batch grows by as much as it may on any data."""

    def observe(self, norms: GradientNorms) -> None:
        super().observe(replace(norms, small_norm_squared=10 * norms.small_norm_squared))

"""A progress bar for the trace of one step with all layers."""

import re

from tqdm import tqdm

from torchtune_adaptive.plan.trace.events import Operation

_LAYER = re.compile(r"(frozen model\.)?layers\.\d+(?=\.|$)")


class StepProgress:
    """Counts a step's passes through layers, forward and backward, on standard error.

        Args:
            is_shown: whether to write the progress bar.
    Attributes:
        num_passes: passes counted so far.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._bar = tqdm(desc="tracing", unit=" layer passes", disable=not is_shown)
        self._stage = ""
        self._layers: set[str] = set()  # layers that this pass has reached
        self.num_passes = 0

    def __enter__(self) -> "StepProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def start(self, stage: str, *, num_passes: int | None = None) -> None:
        """Show the current stage.

        Args:
            num_passes: passes of the whole step, None if not known yet.
        """
        self._stage = stage
        self._layers.clear()
        if num_passes is not None:
            self._bar.reset(total=num_passes)
        self._bar.set_postfix_str(stage)

    def after(self, operation: Operation) -> None:
        """Count the layer of a finished operation."""
        if operation.phase != self._stage:
            self.start(operation.phase)
        layer = _LAYER.match(operation.module)
        if layer is not None and operation.phase in ("forward", "backward") and layer[0] not in self._layers:
            self._layers.add(layer[0])
            self.num_passes += 1
            self._bar.update()

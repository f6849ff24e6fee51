"""The outputs of `tune-adaptive plan` for one whole step: a table of modules, a snapshot file, a plot."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from torchtune_adaptive.errors import InputError, quote
from torchtune_adaptive.files import check_writable, write_atomically, writing
from torchtune_adaptive.plan.decide import Plan, SizePlan
from torchtune_adaptive.plan.show.modules import modules_text
from torchtune_adaptive.plan.show.plot import DrawnDevice, step_figure
from torchtune_adaptive.plan.show.snapshot import snapshot_bytes
from torchtune_adaptive.plan.show.text import offload_note
from torchtune_adaptive.plan.trace.events import StepEvents
from torchtune_adaptive.report.style import INSTALL, svg_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class StepOutputs:
    """The requested outputs: a table of modules, and files to write.

    Raises:
        InputError: a file's name has a wrong suffix, the file cannot be written, or matplotlib is missing for a plot.
    """

    modules: bool
    snapshot: Path | None
    plot: Path | None

    def __post_init__(self) -> None:
        for option, path, ending in (("--snapshot", self.snapshot, ".pickle"), ("--plot", self.plot, ".svg")):
            if path is None:
                continue
            if path.suffix != ending:
                raise InputError(f"`{option}` must be a file that ends in {ending}, but is {quote(str(path))} instead.")
            with writing(option, path):
                check_writable(path)
        if self.plot is not None and find_spec("matplotlib") is None:
            raise InputError(f"`--plot` must be left out without matplotlib, which {INSTALL} adds, but is given.")

    @property
    def any(self) -> bool:
        """Whether any output is requested."""
        return self.modules or self.snapshot is not None or self.plot is not None

    def texts(self, events: StepEvents, planned: Plan) -> Iterator[str]:
        """Write the files, and yield what to print: the table, then a line for each file once it is written.

        Raises:
            InputError: a file cannot be written.
        """
        if self.modules:
            yield modules_text(events)
        if self.snapshot is not None:
            content = snapshot_bytes(events)
            with writing("--snapshot", self.snapshot):
                write_atomically(self.snapshot, content)
            yield f"Allocations of the step written to {self.snapshot}; view them at https://pytorch.org/memory_viz."
        if self.plot is not None:
            plot = svg_of(partial(_plot, events, planned))
            with writing("--plot", self.plot):
                write_atomically(self.plot, plot)
            yield f"Plot of the step written to {self.plot}."


def shown_size(planned: Plan) -> SizePlan:
    """The batch of the longest rows that is drawn: the only requested one, or the one that a run uses."""
    length = planned.decisive
    return length.asked[0] if len(length.asked) == 1 else length.used


def _plot(events: StepEvents, planned: Plan) -> "Figure":
    size = shown_size(planned)
    device = DrawnDevice(
        memory_bytes=planned.device.memory_bytes or planned.device.limit_bytes,
        usable_bytes=planned.device.usable_bytes,
        added_bytes=size.process_bytes - size.peak_bytes,
    )
    return step_figure(
        events, title=planned.title, world_size=planned.world_size, device=device, note=offload_note([planned])
    )

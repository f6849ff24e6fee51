"""Do plans agree with the peaks of GPU memory that others published?

    python -m benchmarks.published_points

Plans every point of ``published_gpu.json``, whose figures come from the sources that it names. Compares plans with
published figures by group, separately for points whose config is known in full, and writes
``results/published_gpu.md``. No GPU is used.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import median

from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.config_plan import ConfigLaunch
from torchtune_adaptive.plan.decide import Plan
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.trace.tracer import Tracer
from torchtune_adaptive.stock.configs import load_config

FOLDER = Path(__file__).parent
POINTS, RESULTS = FOLDER / "published_gpu.json", FOLDER / "results" / "published_gpu.md"
GIB = 2**30
MEMORY_BYTES = 80 * GIB  # of the card; no peak depends on it
_CARDS = {"A100": "A100 80GB"}  # by what the source says

ABOUT = """\
*published* and *ours* are GiB. Ours is, for memory *allocated* or *active*: tensors and workspaces; *reserved*: what
torch's allocator takes for them; *nvidia-smi*: with what the process is expected to hold outside it too. Plans are of
torchtune 0.6.1; the points are of several versions, on the GPUs named. A point is *well specified* if batch size, row
length, packing, dtype, optimizer, `compile` and checkpointing are known and no row of a data set decides. The well
specified point of the group *process* is where the plan's figure for AMD's GPUs comes from, so that its error shows
nothing. Sources, quotations, overrides and doubts are in `benchmarks/published_gpu.json`.
"""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A published peak of ``bytes``, what is known of the run, and what is not.

    Attributes:
        quantity: "allocated", "active" or "reserved" by torch's allocator, or "nvidia-smi": used by the process.
        unit: as published; ``bytes`` are converted.
        config: the stock config's "name", and "overrides" as on the command line.
        missing: what a plan needs and is not published; None if nothing.
        well_specified: everything is known that memory depends on.
    """

    name: str
    group: str
    source: str
    quote: str
    torchtune_version: str | None
    torch: str | None
    gpu: str
    quantity: str
    unit: str
    bytes: int
    config: dict[str, str | list[str]]
    nproc_per_node: int
    seq_len: int | None
    missing: str | None
    well_specified: bool
    doubts: list[str]

    @property
    def run(self) -> tuple[str, tuple[str, ...], int, int | None]:
        """The run that it was measured in: config, overrides, ranks and tokens of a row."""
        return str(self.config["name"]), tuple(self.config["overrides"]), self.nproc_per_node, self.seq_len


@dataclass(frozen=True)
class Compared:
    """A point and its planned bytes, or why there is no plan."""

    point: Point
    planned_bytes: float | None = None
    reason: str = ""

    @property
    def error(self) -> float:
        """How much the plan is above the published figure, as a fraction of that."""
        assert self.planned_bytes is not None
        return self.planned_bytes / self.point.bytes - 1


def main() -> None:
    """Plan all points, and write the tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()  # refuses arguments
    _report([compare(point) for point in tqdm(read_points(), unit=" points")])


def read_points() -> list[Point]:
    """All points of the file."""
    return [Point(**content) for content in json.loads(POINTS.read_text())]


def compare(point: Point) -> Compared:
    """Plan the point's run."""
    if point.missing is not None:
        return Compared(point, reason=f"{point.missing}: not published")
    planned = _planned(*point.run, gpu=_CARDS.get(point.gpu, point.gpu))
    if isinstance(planned, str):
        return Compared(point, reason=planned)
    return Compared(point, planned_bytes(planned, point.quantity))


@cache
def _planned(name: str, overrides: Sequence[str], world_size: int, seq_len: int, *, gpu: str) -> Plan | str:
    """The plan of a run, or why there is none."""
    try:
        cfg = load_config(name, overrides)
        launch = ConfigLaunch(
            title=name,
            cfg=cfg,
            card=Card(name=gpu, memory_bytes=MEMORY_BYTES),
            world_size=world_size,
            seq_lens=(seq_len,),
            batch_sizes=(cfg.batch_size,),
        )
        return launch.plan(Tracer())
    except InputError as error:
        return str(error)


def planned_bytes(planned: Plan, quantity: str) -> float:
    """What the plan forecasts of ``quantity`` for the batch that it was asked for."""
    ((size,),) = (length.asked for length in planned.lengths)
    return {
        "allocated": size.allocated_bytes,
        "active": size.allocated_bytes,
        "reserved": size.reserved_bytes,
        "nvidia-smi": size.process_bytes,
    }[quantity]


def _report(compared: Sequence[Compared]) -> None:
    planned = [one for one in compared if one.planned_bytes is not None]
    refused = [one for one in compared if one.planned_bytes is None]
    header = ["point", "GPU", "quantity", "published", "ours", "ratio"]
    parts: list[str | list[str]] = []
    for group, members in _by_group(planned):
        parts.append(f"## {group[0].upper()}{group[1:]}")
        for title, is_wanted in (("Well specified:", True), ("Others:", False)):
            rows = [_cells(one) for one in members if one.point.well_specified is is_wanted]
            parts += [title, table(header, rows)] if rows else []
    if refused:
        parts += ["## Not planned", [f"- {one.point.name}: {one.reason}" for one in refused]]
    publish(
        RESULTS,
        "Plans against published peaks of GPU memory",
        provenance("python -m benchmarks.published_points"),
        ABOUT,
        "## Errors",
        "Errors of the plan against the published figure: the worst, and the median of their sizes.",
        table(["group", "well specified", "median", "worst", "others", "median", "worst"], _summary(planned)),
        *parts,
    )


def _by_group(compared: Iterable[Compared]) -> Iterator[tuple[str, list[Compared]]]:
    for group, members in groupby(sorted(compared, key=_group), key=_group):
        yield group, list(members)


def _group(compared: Compared) -> str:
    return compared.point.group


def _summary(planned: Sequence[Compared]) -> Iterator[list[str]]:
    for group, members in _by_group(planned):
        row = [group]
        for is_wanted in (True, False):
            errors = [one.error for one in members if one.point.well_specified is is_wanted]
            row += [str(len(errors)), *_errors(errors)]
        yield row


def _errors(errors: Sequence[float]) -> list[str]:
    """The median of the absolute errors, and the worst error.

    >>> _errors([-0.1, 0.02, 0.04]), _errors([])
    (['4.0 %', '-10.0 %'], ['', ''])
    """
    if not errors:
        return ["", ""]
    return [f"{100 * median(map(abs, errors)):.1f} %", f"{100 * max(errors, key=abs):+.1f} %"]


def _cells(compared: Compared) -> list[str]:
    point = compared.point
    assert compared.planned_bytes is not None
    figures = [f"{point.bytes / GIB:.2f}", f"{compared.planned_bytes / GIB:.2f}", f"{1 + compared.error:.3f}"]
    return [point.name, point.gpu, point.quantity, *figures]


if __name__ == "__main__":
    main()

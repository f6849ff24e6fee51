"""Do plans of Hugging Face models agree with the peaks of GPU memory that others published?

    python -m benchmarks.hugging_face_points

Plans every point of ``published_hugging_face.json``, as ``tune-adaptive plan --hf --trainer transformers`` does, and
writes ``results/published_hugging_face.md``. Needs the environment of ``make .venv-integrations/stamp``, no GPU.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.any_loop import plan_of_loop
from torchtune_adaptive.plan.decide import Plan
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.hugging_face.run import HuggingFaceRun
from torchtune_adaptive.plan.hugging_face.tracing import RunTracer

FOLDER = Path(__file__).parent
POINTS, RESULTS = FOLDER / "published_hugging_face.json", FOLDER / "results" / "published_hugging_face.md"
GIB = 2**30
ABOUT = """\
*published* and *ours* are GiB. Ours is, for memory *allocated*: tensors and workspaces; *reserved*: what torch's
allocator takes for them. Plans are of transformers' Trainer and of the versions above; the points are of those named in
them. Points of several GPUs were measured with FSDP1; plans are of FSDP2. Where the row length is not published, the
longest possible one is planned. Sources, quotations and doubts are in `benchmarks/published_hugging_face.json`.
"""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A published peak of ``bytes`` in a run of ``model``.

    Attributes:
        run: length of rows, ranks and keys of ``HuggingFaceRun``.
        quantity: "allocated" or "reserved" by torch's allocator.
        grade: "A": everything is known that memory depends on; "B": all but one thing that hardly matters.
        row_is_known: whether the length of rows is published.
    """

    name: str
    group: str
    grade: str
    model: str
    run: dict[str, Any]
    batch_size: int
    quantity: str
    bytes: int
    gpu: str
    versions: dict[str, str]
    row_is_known: bool
    source: str
    quote: str
    doubts: list[str]

    def error_of(self, plan: Plan) -> float:
        """How much the plan is above the published figure, as a fraction of that."""
        return self.planned_bytes(plan) / self.bytes - 1

    def planned_bytes(self, plan: Plan) -> float:
        """What the plan forecasts of the quantity."""
        size = plan.size(self.batch_size)
        return size.allocated_bytes if self.quantity == "allocated" else size.reserved_bytes


def main() -> None:
    """Plan the points, and write the tables."""
    parser = argparse.ArgumentParser(description="Compare plans of Hugging Face models with published peaks.")
    parser.add_argument("--only", default="", help="plan only points whose names contain this; nothing is written")
    only = parser.parse_args().only
    content = json.loads(POINTS.read_text())
    points = [Point(**point) for point in content["points"] if only in point["name"]]
    plans: dict[str, Plan | str] = {}
    with tempfile.TemporaryDirectory() as directory:
        for point in points:
            if run_of(point) not in plans:
                plans[run_of(point)] = _planned(point, content["models"][point.model], Path(directory))
            print(*cells(point, plans[run_of(point)]), sep=" | ", flush=True)
    if not only:
        _report(points, plans)


def run_of(point: Point) -> str:
    """A key of the run; points that differ in their batch size alone have the same."""
    return json.dumps([point.model, point.run])


def _planned(point: Point, config: dict[str, Any], directory: Path) -> Plan | str:
    """The plan of the point's run, or why there is none."""
    (directory / "config.json").write_text(json.dumps(config))
    run = HuggingFaceRun(path=str(directory), trainer="transformers", **point.run)
    card = Card.named("80GiB")
    try:
        return plan_of_loop(
            RunTracer(run).trace(), card, ranks=run.ranks, batch_sizes=(), title=point.name, assumptions=""
        )
    except InputError as error:
        return str(error)


def _report(points: Sequence[Point], plans: dict[str, Plan | str]) -> None:
    packages = ("torch", "transformers", "peft", "accelerate")
    parts: list[str | list[str]] = []
    header = ["point", "GPU", "quantity", "published", "ours", "ratio"]
    for group in dict.fromkeys(point.group for point in points):
        rows = [cells(point, plans[run_of(point)]) for point in points if point.group == group]
        parts += [f"## {group}", table(header, rows)]
    publish(
        RESULTS,
        "Plans of Hugging Face models against published peaks",
        provenance("python -m benchmarks.hugging_face_points", packages=packages),
        ABOUT,
        table(["points", "planned", "median", "lowest", "highest"], _summary(points, plans)),
        *parts,
    )


def _summary(points: Sequence[Point], plans: dict[str, Plan | str]) -> Iterator[list[str]]:
    kinds = {
        "known in full": [point for point in points if point.grade == "A"],
        "others, row length known": [point for point in points if point.grade != "A" and point.row_is_known],
        "row length not known": [point for point in points if not point.row_is_known],
    }
    for name, members in kinds.items():
        errors = [point.error_of(plan) for point in members if isinstance(plan := plans[run_of(point)], Plan)]
        figures = [median(map(abs, errors)), min(errors), max(errors)] if errors else []
        yield [name, f"{len(errors)} of {len(members)}", *(f"{100 * figure:+.1f} %" for figure in figures)]


def cells(point: Point, plan: Plan | str) -> list[str]:
    """The table's cells for a point."""
    told = [point.name, point.gpu, point.quantity, f"{point.bytes / GIB:.2f}"]
    if isinstance(plan, str):
        return [*told, f"not planned: {plan}", ""]
    return [*told, f"{point.planned_bytes(plan) / GIB:.2f}", f"{1 + point.error_of(plan):.3f}"]


if __name__ == "__main__":
    main()

"""Ranks that share one card and communicate by NCCL itself. Without CUDA they are rehearsed with gloo on the CPU.

Each sub-part is a launch of its own, with a time limit of its own: a module whose ``measure(stage)`` runs on every rank
and yields sections on rank 0. The first one finds the settings with which NCCL takes ranks of one device.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.on_gpu.nccl.group import BY_SOCKETS, CAREFUL, backend_name
from benchmarks.on_gpu.nccl.launch import Launch, run_ranks
from benchmarks.on_gpu.nccl.torchrun import launch_killed
from benchmarks.on_gpu.stage import Section, Stage

HEADER = ["sub-part", "ranks", "ended", "seconds", "of at most"]
_LEAST_S = 5.0  # a sub-part is not begun with less


@dataclass(frozen=True)
class SubPart:
    """A module that runs on ``ranks`` ranks, for at most ``share`` of the time of the whole part."""

    module: str
    ranks: int
    share: float

    def launch(self, stage: Stage, seconds: float, settings: Mapping[str, str]) -> Launch:
        if self.module == "killed":
            return launch_killed(stage, self.ranks, seconds=seconds, settings=settings)
        return run_ranks(stage, self.module, self.ranks, seconds=seconds, settings=settings)


FIRST = SubPart("collectives", 2, 0.12)
# The most important first. The last one tries as many faults as it has time for.
SUB_PARTS = (
    SubPart("search", 2, 0.15),
    SubPart("recovery", 2, 0.3),
    SubPart("recipe", 2, 0.25),
    SubPart("collectives", 4, 0.12),
    SubPart("recovery", 4, 0.25),
    SubPart("killed", 2, 0.25),
    SubPart("doubt", 2, 0.15),
    SubPart("faults", 2, 1.0),
)


def measure(stage: Stage) -> Iterator[list[Section]]:
    """One sub-part after the other."""
    summary = Section(title="Ranks on one card, by NCCL", header=HEADER)
    summary.text.append(
        f"All ranks are on one device, connected by {backend_name(stage)}; the votes go through gloo. Each rank has"
        " another `NCCL_HOSTID`, so that NCCL takes it for a rank of another machine."
    )
    sections = [summary]
    whole_s, settings, failed = stage.seconds_left, BY_SOCKETS, list[str]()
    for tried in (BY_SOCKETS, CAREFUL):
        settings = tried
        launch = _launched(stage, FIRST, whole_s, settings | {"NCCL_DEBUG": "INFO"}, summary)
        sections += _with_transport(launch)
        yield sections
        if launch.ended == "done" or stage.is_rehearsal:
            break
    else:
        summary.text.append("No other sub-part was run, because the collectives had failed.")
        yield sections
        raise SystemExit("the collectives of two ranks on one device failed")
    if not stage.is_rehearsal:
        summary.text.append("Settings: " + " ".join(f"`{name}={value}`" for name, value in settings.items()) + ".")
    for sub_part in SUB_PARTS:
        launch = _launched(stage, sub_part, whole_s, settings | {"NCCL_DEBUG": "WARN"}, summary)
        sections += launch.sections
        if launch.ended != "done":
            failed.append(f"{sub_part.module} on {sub_part.ranks} ranks")
        yield sections
    if failed:
        raise SystemExit(f"not to their end: {', '.join(failed)}")


def _launched(stage: Stage, sub_part: SubPart, whole_s: float, settings: Mapping[str, str], summary: Section) -> Launch:
    """Launch a sub-part, and note in ``summary`` how it has ended."""
    most_s = min(sub_part.share * whole_s, stage.seconds_left)
    if most_s < _LEAST_S:
        launch = Launch(ended="not begun: no time was left", seconds=0.0)
    else:
        launch = sub_part.launch(stage, most_s, settings)
    cells = [launch.ended, f"{launch.seconds:.0f}", f"{max(most_s, 0):.0f}"]
    summary.rows.append([sub_part.module, str(sub_part.ranks), *cells])
    name = f"{sub_part.module}, {sub_part.ranks} ranks"
    summary.text.extend(f"{name}, {words}." for words in launch.last_words)
    summary.data.append({"sub-part": name, "ended": launch.ended, "seconds": launch.seconds, "settings": {**settings}})
    return launch


def _with_transport(launch: Launch) -> list[Section]:
    """The sections of ``launch``, with how NCCL says that it connects its ranks."""
    found = sorted({found for log in launch.logs for found in re.findall(r" via (\S+)", log)})
    words = [f"NCCL says that it connects them via {', '.join(found)}."] if found else []
    return [replace(section, text=[*section.text, *words]) for section in launch.sections]

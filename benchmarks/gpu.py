"""Measure everything that needs a CUDA device, on one device, in half an hour.

    python -m benchmarks.gpu [--parts PART,...] [--keep] [--minutes MINUTES] [--output STEM]

Each part runs in a process of its own, with a time limit of its own, and can be run alone. Its results are written
before the next part begins: JSON and Markdown to ``results/gpu_DEVICE``, or to STEM. With ``--keep``, results of other
parts that are already there stay. Without CUDA every part is rehearsed on the CPU with a tiny model, which shows only
that the parts run. The exit status is 0 if all parts ran, with and without CUDA.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_gpu.stage import SIMULATED
from benchmarks.provenance import commit, provenance
from benchmarks.tables import table

_ROOT = Path(__file__).parent.parent
RESULTS = _ROOT / "benchmarks" / "results"
# Seconds that a part may take on a GPU, what is known least first: the first three take nine minutes. A part that has
# to choose does the most important first.
PARTS = {
    "nccl": 260,
    "fastest": 150,
    "sizes": 130,
    "recovery": 100,
    "thrashing": 45,
    "tokens": 75,
    "loop": 120,
    "kernels": 300,
}
_TIMES_WITHOUT_GPU = 4  # as many seconds if there is no GPU, so that a slow machine is no failure
_GRACE_S = 15  # after which a part that has not ended gets SIGTERM
_ENDING_S = 40  # after which it gets SIGKILL; a launcher gives its ranks 30
# Title and warning for what is no GPU.
_ABOUT: dict[str | None, tuple[str, str]] = {
    None: (
        "Rehearsal on a CPU of what is to be measured on a GPU",
        "**No GPU was measured.** These figures are of a tiny model on the CPU; they show that parts run.",
    ),
    SIMULATED: (
        "Memory on a simulated GPU",
        "**No GPU was measured.** torch and its allocator are those for CUDA, and kernels compute nothing (see"
        " [the simulated GPU](../../tests/simulated_gpu/README.md)). Allocated and reserved bytes are as torch counts"
        " them on a GPU. Times, losses and speeds mean nothing, and CUDA's context has the size that it was given.",
    ),
}

Result = dict[str, Any]


def main() -> None:
    """Run the parts that are asked for, and write what they found."""
    options = _options()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if gpu is None:
        print("There is no CUDA device: every part is rehearsed on the CPU, with a tiny model, and measures no GPU.")
    slug = re.sub(r"[^a-z0-9]+", "_", (gpu or "").lower()).strip("_")
    name = "rehearsal_cpu" if gpu is None else "simulated" if gpu == SIMULATED else slug
    times = _TIMES_WITHOUT_GPU if gpu in _ABOUT else 1
    stem: Path = options.output or RESULTS / f"gpu_{name}"
    deadline = time.monotonic() + 60 * options.minutes
    results = _earlier(stem, but=options.parts) if options.keep else []
    with tempfile.TemporaryDirectory() as directory:
        for part in options.parts:
            left = deadline - _GRACE_S - time.monotonic()
            result = _play(part, Path(directory), seconds=min(times * PARTS[part], left))
            print(f"{part}: {result['ended']} after {result['seconds']:.0f} s", flush=True)
            results.append(result | {"about": _about(gpu, commit_name=options.commit)})
            _write(results, stem, gpu=gpu)
    print(stem.with_suffix(".md").read_text(), f"\nWritten to {stem}.md and .json", sep="")
    raise SystemExit(any(result["ended"] != "done" for result in results if result["part"] in options.parts))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measurements on one CUDA device.")
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--keep", action="store_true", help="keep the results of other parts")
    parser.add_argument("--minutes", type=float, default=30.0, help="no part begins or continues after that")
    parser.add_argument("--output", type=Path, help="where results go, without the ending")
    parser.add_argument("--commit", default=commit() or "unknown", help="of this tree, if it is not a repository")
    return parser.parse_args()


def _parts(names: str) -> list[str]:
    parts = names.split(",")
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"parts must be of {', '.join(PARTS)}, but there is {unknown[0]!r}")
    return parts


def _play(part: str, directory: Path, *, seconds: float) -> Result:
    """Run a part in a process of its own, and end all processes that it has left."""
    output, started = directory / f"{part}.json", time.monotonic()
    result: Result = {"part": part, "sections": [], "seconds": 0.0}
    if seconds <= 0:
        return result | {"ended": "not started: no time was left"}
    process = subprocess.Popen(_command(part, output, seconds, directory), start_new_session=True, env=_environment())
    try:
        status = process.wait(timeout=seconds + _GRACE_S)
        ended = "done" if status == 0 else f"failed with exit status {status}"
    except subprocess.TimeoutExpired:
        ended = f"killed, for it had not ended after {seconds:.0f} s"
    finally:
        _end(process)
    sections = json.loads(output.read_text()) if output.exists() else []
    return result | {"ended": ended, "seconds": time.monotonic() - started, "sections": sections}


def _command(part: str, output: Path, seconds: float, directory: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.on_gpu", part, str(output), str(seconds), str(directory)]


def _environment() -> dict[str, str]:
    """The environment in which a part finds this checkout, installed or not, and uses no hub."""
    paths = [str(_ROOT), str(_ROOT / "recipes"), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a part and of what it launched: a launcher ends its ranks at SIGTERM, not at SIGKILL."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _ENDING_S
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _earlier(stem: Path, *, but: list[str]) -> list[Result]:
    """The results of other parts that were written to ``stem``."""
    path = stem.with_suffix(".json")
    found = json.loads(path.read_text()) if path.exists() else []
    return [result for result in found if result["part"] not in but]


def _about(gpu: str | None, *, commit_name: str) -> str:
    command = " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])
    return provenance(command, commit_name=commit_name, device=_device(gpu))


def _write(results: list[Result], stem: Path, *, gpu: str | None) -> None:
    """Write the results in the order of ``PARTS``, below how each was measured."""
    results = sorted(results, key=lambda result: _place(result["part"]))
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    title, warning = _ABOUT.get(gpu, ("Measured on a GPU", ""))
    lines = [f"# {title}", "", *_provenance(results)]
    if warning:
        lines += ["", warning]
    for result in results:
        for section in result["sections"]:
            lines += ["", f"## {section['title']}", "", "  \n".join(section["text"]), ""]
            lines += table(section["header"], section["rows"])
        if result["ended"] != "done":
            lines += ["", f"## {result['part']}: not to its end", "", f"{result['ended']}."]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _place(part: str) -> int:
    """Its place in ``PARTS``; results of parts that no longer exist come last."""
    return [*PARTS, part].index(part)


def _provenance(results: list[Result]) -> list[str]:
    """How the results were measured, and which parts, if not all alike."""
    parts: dict[str, list[str]] = {}
    for result in results:
        parts.setdefault(result["about"], []).append(result["part"])
    if len(parts) == 1:
        return list(parts)
    return [f"- {', '.join(names)}: {about}" for about, names in parts.items()]


def _device(gpu: str | None) -> str:
    if gpu is None:
        return "no GPU"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}"


if __name__ == "__main__":
    main()

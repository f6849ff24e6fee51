"""How do other projects find the largest batch that fits, and at what cost, compared with ``find_max_batch_size``?

    make .venv-peers
    OMP_NUM_THREADS=1 .venv-peers/bin/python -m benchmarks.search
    OMP_NUM_THREADS=1 .venv-simulated-gpu/bin/python -m benchmarks.search

Every contestant searches on the same train step, model, optimizer, data and limit: on the CPU with a card that counts
live bytes and fails as CUDA does; on the simulated GPU with all of its memory, where torch's own allocator fails. Each
runs in a process of its own, several times in turn, and an exhaustive search finds the true size. Prints tables and
writes them to ``results/search_cpu.md`` or ``results/search_simulated_gpu.md``; ``--rehearse`` runs five contestants
once and writes nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.peers.data import Rows, rows_of_different_lengths, rows_of_one_length
from benchmarks.peers.hugging_face import accelerate_finder, trainer_finder
from benchmarks.peers.lightning_finder import lightning_finder
from benchmarks.peers.ours import bisected, exhaustive, ours
from benchmarks.peers.report import Measured, document
from benchmarks.peers.rfc import bisection, difference, halving
from benchmarks.peers.task import LARGE, SMALL, Task
from benchmarks.peers.toma_finder import toma_finder
from benchmarks.peers.watch import Found
from benchmarks.provenance import PACKAGES, provenance
from benchmarks.tables import publish
from torchtune_adaptive.settings import parse_memory

COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.search"
PEERS = ("lightning", "accelerate", "transformers", "toma")
_RESULTS = Path(__file__).parent / "results"
LONGEST_SEARCH_S = 600
DEFAULT = "ours (defaults)"
EXPANDABLE = "ours (defaults), expandable segments"
EXHAUSTIVE = "exhaustive"
CONTESTANTS: dict[str, Callable[[Task], Found]] = {
    DEFAULT: ours,
    "ours, linear_extrapolation, margin 0": partial(ours, margin=0.0),
    "ours, binary_search, margin 0": partial(ours, strategy="binary_search", margin=0.0),
    "ours, decrease_until_oom from 128, margin 0": partial(
        ours, strategy="decrease_until_oom", margin=0.0, max_batch_size=128
    ),
    "ours (defaults), then RecoverableStep": partial(ours, recovers=True),
    EXPANDABLE: ours,
    "Lightning BatchSizeFinder, power": partial(lightning_finder, mode="power"),
    "Lightning BatchSizeFinder, binsearch": partial(lightning_finder, mode="binsearch"),
    "accelerate find_executable_batch_size": accelerate_finder,
    "HF Trainer auto_find_batch_size": trainer_finder,
    "toma.batch from 512": toma_finder,
    "RFC 2199: halve chunks of 128 rows": halving,
    "RFC 2199: bisect 0 to 100000": bisection,
    "RFC 2199: memory(2) - memory(1)": difference,
}

REHEARSED = [
    DEFAULT,
    "Lightning BatchSizeFinder, power",
    "HF Trainer auto_find_batch_size",
    "toma.batch from 512",
    "RFC 2199: memory(2) - memory(1)",
]


@dataclass(frozen=True)
class Case:
    """Data, and the limit under which to search: on the simulated GPU the memory of the whole device."""

    name: str
    limit: str
    make_rows: Callable[[], Rows]


@dataclass(frozen=True)
class Place:
    """Where the contestants search: a device, what is trained there, and how often each contestant searches."""

    name: str
    device: torch.device
    geometry: Mapping[str, Any]
    cases: Sequence[Case]
    true_size: Callable[[Task], Found]
    rounds: int
    results: Path


CPU = Place(
    "CPU",
    torch.device("cpu"),
    SMALL,
    [
        Case("rows of 128 tokens", "100MiB", partial(rows_of_one_length, 128)),
        Case("rows of 128 tokens", "128MiB", partial(rows_of_one_length, 128)),
        Case(
            "rows of 8 to 256 tokens, lognormal about 60",
            "256MiB",
            partial(rows_of_different_lengths, median=60, sigma=0.6, shortest=8, longest=256),
        ),
    ],
    exhaustive,
    2,
    _RESULTS / "search_cpu.md",
)
SIMULATED_GPU = Place(
    "simulated GPU",
    torch.device("cuda", 0),
    LARGE,
    [
        Case("rows of 512 tokens", "24GiB", partial(rows_of_one_length, 512)),
        Case(
            "rows of 16 to 1024 tokens, lognormal about 240",
            "40GiB",
            partial(rows_of_different_lengths, median=240, sigma=0.6, shortest=16, longest=1024),
        ),
    ],
    bisected,
    1,
    _RESULTS / "search_simulated_gpu.md",
)


def main() -> None:
    """Measure every contestant in every case and write the tables; or run one contestant in this process."""
    place = SIMULATED_GPU if torch.cuda.is_available() else CPU
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="five contestants once, and no file")
    parser.add_argument("--process", nargs=3, metavar=("CONTESTANT", "CASE", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        contestant, case, path = arguments.process
        _be_one_process(contestant, place, place.cases[int(case)], Path(path))
        return
    missing = [peer for peer in PEERS if find_spec(peer) is None]
    if missing:
        sys.exit(
            f"`benchmarks.search` compares with {', '.join(PEERS)}, of which {', '.join(missing)} must be installed:"
            " make their environment with `make .venv-peers` and run it with `.venv-peers/bin/python`."
        )
    if arguments.rehearse:
        print("\n".join(_measured(place, [1], REHEARSED, rounds=1)))
    else:
        names = [EXHAUSTIVE, *(name for name in CONTESTANTS if place is SIMULATED_GPU or name != EXPANDABLE)]
        publish(_measured(place, range(len(place.cases)), names, rounds=place.rounds), place.results)


def _measured(place: Place, numbers: Sequence[int], names: list[str], *, rounds: int) -> list[str]:
    """The document on the cases of ``numbers``; the exhaustive search runs in the first round only."""
    started, load = time.perf_counter(), os.getloadavg()[0]
    cases = [place.cases[number] for number in numbers]
    measured = [Measured(case.name, case.limit, {name: [] for name in CONTESTANTS}) for case in cases]
    turns = [
        (number, result, name)
        for round_number in range(rounds)
        for number, result in zip(numbers, measured, strict=True)
        for name in names[:: -1 if round_number % 2 else 1]
        if name != EXHAUSTIVE or round_number == 0
    ]
    progress = tqdm(turns, desc="searching")
    for number, result, name in progress:
        progress.set_postfix_str(f"{result.limit}, {name}")
        found = _in_a_process(name, number, place.cases[number])
        if name == EXHAUSTIVE:
            result.exact = found
        else:
            result.found[name].append(found)
    about = provenance(
        COMMAND,
        ranks=f"one process of {torch.get_num_threads()} thread at a time, {rounds} round{'s' * (rounds > 1)}",
        seconds=time.perf_counter() - started,
        load=load,
        device="no GPU" if place is CPU else "a simulated GPU",
        packages=(*PACKAGES, *PEERS),
    )
    return document(measured, place=place.name, geometry=place.geometry, default=DEFAULT, provenance=about)


def _in_a_process(contestant: str, number: int, case: Case) -> Found:
    """What ``contestant`` found in a fresh process, or why it found nothing."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "found.json"
        command = [sys.executable, "-m", "benchmarks.search", "--process", contestant, str(number), str(path)]
        gpu = {"SIMULATED_GPU_GIB": f"{parse_memory(case.limit) / 2**30:g}", "SIMULATED_CAPABILITY": "70"}  # no Triton
        if contestant == EXPANDABLE:
            gpu["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=LONGEST_SEARCH_S,
                check=False,
                env=os.environ | gpu,
            )
        except subprocess.TimeoutExpired:
            return Found(error=f"not done after {LONGEST_SEARCH_S} s")
        if path.exists():
            return Found(**json.loads(path.read_text()))
        last_words = done.stderr.strip().splitlines()[-1:]
        return Found(error=f"its process ended with status {done.returncode}: {''.join(last_words)}")


def _be_one_process(contestant: str, place: Place, case: Case, path: Path) -> None:
    limit_bytes = parse_memory(case.limit) if place is CPU else None
    task = Task(place.device, limit_bytes, case.make_rows(), place.geometry)
    try:
        found = (place.true_size if contestant == EXHAUSTIVE else CONTESTANTS[contestant])(task)
    except Exception as error:  # a contestant that fails is a result
        found = Found(error=f"{type(error).__name__}: {error}".splitlines()[0])
    path.write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()

"""What does a plan cost, in seconds and memory?

    python -m benchmarks.plan_cost

Runs ``tune-adaptive plan`` for configs from 1B to 405B on up to 512 ranks, each as a program of its own
and with rows of 2048 tokens, and reads its wall time and the peak of its resident memory. Prints a table
and writes it to ``results/plan_cost_cpu.md``.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table

RESULTS = Path(__file__).parent / "results" / "plan_cost_cpu.md"
CASES = [
    ("llama3_2/1B_full", 8),
    ("llama3_1/8B_full", 8),
    ("llama3_1/70B_full", 8),
    ("llama3_1/70B_full", 64),
    ("llama3_1/70B_full", 512),
    ("llama3_1/8B_lora", 8),
    ("llama3_1/8B_qlora_single_device", 1),
    ("llama3_1/405B_qlora", 8),
]


class Cost(NamedTuple):
    """Of one program with its children: seconds, and the most memory that one of them had resident."""

    seconds: float
    resident_bytes: int


def main() -> None:
    rows = []
    for config, ranks in tqdm(CASES, desc="planning"):
        command = ["-m", "torchtune_adaptive.plan.cli", "plan", "--config", config, "--nproc_per_node", str(ranks)]
        answer, cost = _run([sys.executable, *command, "--memory", "80GiB", "--seq-len", "2048", "--json"])
        plan = json.loads(answer)
        length = plan["lengths"][0]
        traced = " and ".join(map(str, plan["traced_layers"]))
        figures = f"{cost.seconds:.1f}", f"{cost.resident_bytes / 2**30:.2f}"
        rows.append(
            [config, str(ranks), f"{traced} of {plan['num_layers']}", *figures, str(length["exact_batch_size"])]
        )
    _report(rows)


def _run(command: list[str]) -> tuple[str, Cost]:
    """What ``command`` prints, and what it costs; of its children's memory the most, by a process between."""
    between = (
        "import json, resource, subprocess, sys; "
        "out = subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True).stdout; "
        "print(json.dumps([out, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", between, *command], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    answer, resident_kib = json.loads(done.stdout)
    return answer, Cost(seconds, resident_kib * 1024)


def _report(rows: list[list[str]]) -> None:
    header = ["config", "ranks", "layers traced", "seconds", "resident GiB", "largest batch at 80 GiB"]
    lines = [
        "# What a plan costs",
        "",
        provenance("python -m benchmarks.plan_cost"),
        "",
        "Wall seconds of the whole program, imports included; rows of 2048 tokens; the batch with what a GPU adds by"
        " the defaults.",
        "",
        *table(header, rows),
    ]
    publish(lines, RESULTS)


if __name__ == "__main__":
    main()

"""What does a plan cost, in seconds and memory?

    python -m benchmarks.plan_cost

Runs ``tune-adaptive plan`` for configs from 1B to 405B on up to 512 ranks, with rows of 2048 tokens. Each plan is a
program of its own, whose wall time and peak of resident memory are measured. Prints a table and writes it to
``results/plan_cost_cpu.md``.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

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


def main() -> None:
    rows = []
    for config, ranks in tqdm(CASES, desc="planning"):
        command = [sys.executable, "-m", "torchtune_adaptive.cli.main", "plan", "--config", config, "--json"]
        command += ["--nproc_per_node", str(ranks), "--memory", "80GiB", "--seq-len", "2048"]
        answer, seconds, resident_bytes = _run(command)
        plan = json.loads(answer)
        length = plan["lengths"][0]
        traced = " and ".join(map(str, plan["traced_layers"]))
        figures = f"{seconds:.1f}", f"{resident_bytes / 2**30:.2f}"
        rows.append(
            [config, str(ranks), f"{traced} of {plan['num_layers']}", *figures, str(length["exact_batch_size"])]
        )
    _report(rows)


def _run(command: list[str]) -> tuple[str, float, int]:
    """What ``command`` prints, its seconds, and the most bytes that it or one of its children had resident."""
    between = (
        "import json, resource, subprocess, sys; "
        "out = subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True).stdout; "
        "print(json.dumps([out, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", between, *command], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    answer, resident_kib = json.loads(done.stdout)
    return answer, seconds, resident_kib * 1024


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

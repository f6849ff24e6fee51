"""What does a plan cost, in seconds and memory?

    make .venv-integrations/stamp
    OMP_NUM_THREADS=1 python -m benchmarks.plan_cost

Runs ``tune-adaptive plan`` for configs from 1B to 405B on up to 512 ranks, and by ``--hf`` for models of such sizes.
Each plan is a program of its own that begins with an empty cache, and runs once more with what the first one left
there. Prints a table and writes it to ``results/plan_cost_cpu.md``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table

RESULTS = Path(__file__).parent / "results" / "plan_cost_cpu.md"
CASES = [
    ("llama3_2/1B_full", 8, "2048"),
    ("llama3_1/8B_full", 8, "2048"),
    ("llama3_1/8B_full", 8, "4096,8192"),
    ("llama3_1/70B_full", 8, "2048"),
    ("llama3_1/70B_full", 64, "2048"),
    ("llama3_1/70B_full", 512, "2048"),
    ("llama3_1/8B_lora", 8, "2048"),
    ("llama3_1/8B_qlora_single_device", 1, "2048"),
    ("llama3_1/405B_qlora", 8, "2048"),
]
# Models of transformers, for `--hf`: figures of their config.json.
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
MODELS = {
    "Llama-3.1-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "Llama-32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64},  # sizes of Qwen2.5-32B
    "Llama-3.1-70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
}
HEAD_DIM = 128
WITH_TRANSFORMERS = Path(__file__).parent.parent / ".venv-integrations" / "bin" / "python"  # beside no torchtune


@dataclass(frozen=True)
class Run:
    """What a program printed, and its cost, with that of its children."""

    answer: str
    wall_s: float
    cpu_s: float
    resident_bytes: int


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # refuses arguments
    load, started = os.getloadavg()[0], time.perf_counter()
    rows = []
    with tempfile.TemporaryDirectory() as models:
        cases = [(config, ["--config", config], ranks, lengths) for config, ranks, lengths in CASES]
        cases += [(f"--hf {name}", ["--hf", _folder(Path(models), name)], 8, "2048") for name in MODELS]
        for name, options, ranks, lengths in tqdm(cases, desc="planning"):
            python = sys.executable if "--config" in options else str(WITH_TRANSFORMERS)
            command = [python, "-m", "torchtune_adaptive.cli", "plan", *options, "--json"]
            command += ["--nproc_per_node", str(ranks), "--memory", "80GiB", "--seq-len", lengths]
            with tempfile.TemporaryDirectory() as cache:
                cold, again = (_run(command, cache) for _ in range(2))
            rows.append([name, str(ranks), lengths.replace(",", ", "), *_figures(cold, again)])
    _report(rows, load, time.perf_counter() - started)


def _folder(parent: Path, name: str) -> str:
    """A folder with the model's config.json."""
    sizes = MODELS[name]
    folder = parent / name
    folder.mkdir()
    heads = {"num_attention_heads": sizes["hidden_size"] // HEAD_DIM}
    (folder / "config.json").write_text(json.dumps(_LLAMA | sizes | heads))
    return str(folder)


def _figures(cold: Run, again: Run) -> list[str]:
    plan = json.loads(cold.answer)
    largest = " and ".join(str(length["largest_batch_size"]) for length in plan["lengths"])
    traced = f"{' and '.join(map(str, plan['traced_layers']))} of {plan['num_layers']}"
    costs = [f"{one:.1f}" for one in (cold.cpu_s, cold.wall_s, again.wall_s)]
    return [traced if plan["traced_layers"] else "all", *costs, f"{cold.resident_bytes / 2**30:.2f}", largest]


def _run(command: list[str], cache: str) -> Run:
    """Run ``command`` with this folder for caches."""
    between = (
        "import json, resource, subprocess, sys; "
        "out = subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True).stdout; "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(json.dumps([out, used.ru_utime + used.ru_stime, used.ru_maxrss]))"
    )
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    command = [sys.executable, "-c", between, *command]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    wall_s = time.perf_counter() - started
    answer, cpu_s, resident_kib = json.loads(done.stdout)
    return Run(answer, wall_s, cpu_s, resident_kib * 1024)


def _report(rows: list[list[str]], load: float, seconds: float) -> None:
    header = ["config", "ranks", "tokens per row", "layers traced", "CPU, s", "wall, s", "again, wall, s"]
    header += ["resident GiB", "largest batch at 80 GiB"]
    publish(
        RESULTS,
        "What a plan costs",
        provenance("OMP_NUM_THREADS=1 python -m benchmarks.plan_cost", load=load, seconds=seconds),
        "Seconds of the whole program, imports included, with an empty cache: of CPU time, and by the clock, which"
        " other load on the machine lengthens. *Again*: the same command once more, which finds the traced steps of a"
        " config in its cache. Models of `--hf` train by the defaults of TRL's SFTTrainer: weights in float32, a copy"
        " on each rank. The largest batch is with what a GPU adds by the defaults, for each length of rows.",
        table(header, rows),
    )


if __name__ == "__main__":
    main()

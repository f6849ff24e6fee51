"""Does a plan predict the host memory of loading a checkpoint, training, and saving?

    OMP_NUM_THREADS=1 python -m benchmarks.host_memory

Plans and trains recipes of a model of 105 million parameters on CPU ranks, from checkpoints in Hugging Face's format.
Each rank's anonymous and file-backed resident memory is sampled every millisecond. On a CPU the tensors that a rank
computes with are in host memory too, in the plan as in the run. Prints a table and writes it to
``results/host_memory_cpu.md``.
"""

import argparse
import json
import logging
import os
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import save_file
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.llama2 import llama2

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support.ranks import run_alone, run_on_ranks
from tests.support.recipe_runs import COMMON, adaptive_recipe, finished, tiny_config
from torchtune_adaptive.plan.config_plan import ConfigLaunch
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.trace.tracer import Tracer
from torchtune_adaptive.text import format_bytes
from torchtune_adaptive.tiny import MODEL_GEOMETRY, make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "host_memory_cpu.md"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.host_memory"
GEOMETRY = {"num_layers": 6, "num_heads": 16, "num_kv_heads": 16, "embed_dim": 1024, "intermediate_dim": 4096}
SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
CASES = (
    ("full", 2, SAFETENSORS),
    ("full", 2, BIN),
    ("full_single", 1, SAFETENSORS),
    ("lora", 2, SAFETENSORS),
    ("full_dpo", 2, SAFETENSORS),
)
PHASES = ("loading", "training", "saving")
SEQ_LEN = 64


class ResidentMemory:
    """Samples this process's resident memory, and keeps the maximum of each phase.

    Attributes:
        anonymous_bytes, file_bytes: the maximum by phase.
    """

    def __init__(self) -> None:
        self._phase = ""
        self.anonymous_bytes: dict[str, int] = defaultdict(int)
        self.file_bytes: dict[str, int] = defaultdict(int)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "ResidentMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def enter(self, phase: str) -> None:
        """What is resident from now on belongs to ``phase``."""
        self._phase = phase

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            phase, (anonymous, of_files) = self._phase, resident_bytes()
            self.anonymous_bytes[phase] = max(self.anonymous_bytes[phase], anonymous)
            self.file_bytes[phase] = max(self.file_bytes[phase], of_files)


def resident_bytes() -> tuple[int, int]:
    """This process's resident memory: anonymous, and of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, of_files = (1024 * int(lines[name].split()[0]) for name in ("RssAnon", "RssFile"))
    return anonymous, of_files


def main() -> None:
    """Measure and write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()  # refuses arguments
    started, load = time.perf_counter(), os.getloadavg()[0]
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    # Tensors of large models are mapped and freed one by one. This makes it so for these smaller ones too.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HF_HOME"] = f"{directory}/huggingface"
        assets = Path(directory) / "tiny"
        make_tiny_assets(assets, num_samples=400)
        for name in (SAFETENSORS, BIN):
            _make_checkpoint(Path(directory) / name.partition(".")[2], name)
        rows = [row for case in CASES for row in _rows(assets, *case)]
    run = {"seconds": time.perf_counter() - started, "load": load, "ranks": "gloo ranks of 1 thread"}
    _report(rows, run)


def _make_checkpoint(directory: Path, name: str) -> None:
    directory.mkdir()
    torch.manual_seed(0)
    heads, width = GEOMETRY["num_heads"], GEOMETRY["embed_dim"]
    weights = tune_to_hf(llama2(**MODEL_GEOMETRY | GEOMETRY).state_dict(), heads, heads, width)
    if name == SAFETENSORS:
        save_file(weights, directory / name, metadata={"format": "pt"})
    else:
        torch.save(weights, directory / name)
    config = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": width}
    (directory / "config.json").write_text(json.dumps(config))


def _config(assets: Path, kind: str, name: str) -> DictConfig:
    checkpoints = assets.parent / name.partition(".")[2]
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(checkpoints),
        "checkpoint_files": [name],
        "recipe_checkpoint": None,
        "output_dir": str(assets.parent / f"of_{kind}_{checkpoints.name}"),
        "model_type": "LLAMA2",
        "safe_serialization": name == SAFETENSORS,
    }
    both = {"checkpointer": checkpointer} | ({"ref_checkpointer": checkpointer} if kind == "full_dpo" else {})
    options = COMMON | {"epochs": 2, "max_steps_per_epoch": 1, "batch_size": 1, "tokenizer__max_seq_len": SEQ_LEN}
    options |= {f"model__{key}": value for key, value in GEOMETRY.items()} | both
    return tiny_config(
        kind, assets, Path(checkpointer["output_dir"]), **options, adaptive={"oom_recovery": False, "seq_len": SEQ_LEN}
    )


def _measure(rank: int, assets: Path, kind: str, name: str) -> tuple[int, dict[str, int], dict[str, int]]:
    """A rank's anonymous memory before set-up, the most that each phase adds, and the most memory of files in each."""
    logging.disable(logging.WARNING)
    base: Any = adaptive_recipe(kind)
    before, _ = resident_bytes()
    with ResidentMemory() as resident:

        class Measured(base):
            def setup(self, cfg: DictConfig) -> None:
                resident.enter("loading")
                super().setup(cfg=cfg)

            def _setup_optimizer(self, *args: Any, **options: Any) -> Any:
                resident.enter("set-up")
                return super()._setup_optimizer(*args, **options)

            def train(self) -> None:
                resident.enter("training")
                super().train()

            def save_checkpoint(self, *args: Any, **options: Any) -> Any:
                resident.enter("saving")
                saved = super().save_checkpoint(*args, **options)
                resident.enter("training")
                return saved

        finished(Measured, _config(assets, kind, name))
    return before, {phase: resident.anonymous_bytes[phase] - before for phase in PHASES}, resident.file_bytes


def _rows(assets: Path, kind: str, ranks: int, name: str) -> list[list[str]]:
    """The rows of a case: the planned memory, and the sum of the most memory of each rank."""
    cfg = _config(assets, kind, name)
    launch = ConfigLaunch(
        title=name,
        cfg=cfg,
        card=Card(name="any", memory_bytes=2**40),
        world_size=ranks,
        seq_lens=(SEQ_LEN,),
        batch_sizes=(cfg.batch_size,),
    )
    host = launch.plan(Tracer()).host
    assert host is not None
    if kind.endswith("_single"):
        found = [run_alone(_measure, 0, assets, kind, name)]
    else:
        found = run_on_ranks(_measure, ranks, assets, kind, name)
    rows = []
    for phase in PHASES:
        planned, measured = host.tensor_bytes[phase], sum(added[phase] for _, added, _ in found)
        before = max(before for before, *_ in found)
        files = max(of_files[phase] for *_, of_files in found)
        figures = map(format_bytes, (planned, measured, files, before))
        rows.append([kind, str(ranks), name, phase, *figures, f"{measured / planned:.3f}"])
    return rows


def _report(rows: list[list[str]], run: dict[str, Any]) -> None:
    header = ["recipe", "ranks", "checkpoint", "while", "planned", "anonymous", "of files", "before"]
    publish(
        RESULTS,
        "Host memory of a run, CPU",
        provenance(COMMAND, **run),
        "*Planned*: tensors on the host, of all ranks. *Anonymous*: the most that each rank has had more than before"
        " set-up, summed over the ranks. *Of files*: the most that one rank had mapped. *Before*: what one rank's"
        " process had, with all its imports. A model of 105 million parameters in float32 (0.39 GiB), AdamW; one row"
        " of 64 tokens.",
        table([*header, "measured / planned"], rows),
    )


if __name__ == "__main__":
    main()

"""``tune run`` as a user writes it, with the stock config, while another process takes the memory that it can get."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torchtune import training
from torchtune.config import instantiate

from benchmarks.on_gpu.stage import Section, Stage
from torchtune_adaptive.stock.configs import load_config
from torchtune_adaptive.text import format_bytes
from torchtune_adaptive.tiny import DATA_NAME, TOKENIZER_NAME, make_tiny_assets

_STEPS = 80
_STAYS_S = 8
_LEFT = 9 * 2**30  # bytes that it leaves
HEADER = ["figure", "seen"]
_SHOWN_EVENTS = ("started", "sizes", "checkpoint", "ended")
# Comes as soon as there is a file: after the first step, which is a small one.
_NEIGHBOUR = f"""
import sys, time
from pathlib import Path
from benchmarks.on_gpu.neighbour import Neighbour
neighbour = Neighbour()
while not Path(sys.argv[1]).exists():
    time.sleep(0.005)
deadline = time.monotonic() + {_STAYS_S}
while time.monotonic() < deadline:  # also what is freed meanwhile
    neighbour.take(leave_bytes={_LEFT})
    time.sleep(0.02)
print(neighbour.num_bytes, flush=True)
"""


def measure(stage: Stage) -> Iterator[list[Section]]:
    """The command, whose log and report are read."""
    out, log = stage.directory / "run", stage.directory / "command.log"
    command = _command(stage, out)
    status, seconds, taken = _run(stage, command, log)
    lines = [json.loads(line) for path in out.glob("adaptive_log.jsonl") for line in path.open()]
    steps = [line for line in lines if "event" not in line]
    rows = [
        ["exit status", str(status)],
        ["seconds", f"{seconds:.0f}"],
        ["steps", str(len(steps))],
        ["memory that the neighbour took", taken],
        ["micro-batches by step", " ".join(str(line["micro_batch_size"]) for line in steps)],
        ["seconds by step", " ".join(f"{line['seconds']:.2f}" for line in steps)],
        *([line["event"], _shown(line)] for line in lines if line.get("event") in _SHOWN_EVENTS),
    ]
    shown = " ".join(re.sub(r"/\S*/", "", part) for part in command[2:])
    data: list[dict[str, Any]] = [{"status": status, "lines": lines}]
    yield [Section(title="The command", header=HEADER, rows=rows, text=[f"`{shown}`"], data=data)]
    if status != 0:
        raise SystemExit(f"the command ended with status {status}: {log.read_text()[-2000:]}")


def _run(stage: Stage, command: list[str], log: Path) -> tuple[int, float, str]:
    """Run the command, with the neighbour: its exit status, its seconds, and the memory that the neighbour took."""
    started, come = time.monotonic(), stage.directory / "come"
    neighbour = None
    if not stage.is_rehearsal:
        neighbour = subprocess.Popen([sys.executable, "-c", _NEIGHBOUR, str(come)], stdout=subprocess.PIPE, text=True)
    with log.open("w") as file:
        run = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=stage.directory)
        try:
            while run.poll() is None and stage.seconds_left > 5:
                if not come.exists() and "|1|Loss" in log.read_text(errors="replace"):  # in the progress bar
                    come.touch()
                time.sleep(0.01)
        finally:
            run.terminate()
            come.touch()
    status, seconds = run.wait(), time.monotonic() - started
    return status, seconds, format_bytes(int(neighbour.communicate()[0])) if neighbour else "none"


def _shown(line: dict[str, Any]) -> str:
    left_out = ("event", "time", "path", "epoch", "epochs")
    return ", ".join(f"{name} {value}" for name, value in line.items() if name not in left_out).replace("|", "/")[:500]


def _command(stage: Stage, out: Path) -> list[str]:
    assets = stage.directory / "assets"
    make_tiny_assets(assets, num_samples=4000)
    config = stage.full if stage.is_rehearsal else "llama3_2/1B_full"
    keys = [f"output_dir={out}", "use_maximum_batch_size=True", f"max_steps_per_epoch={_STEPS}", "epochs=1"]
    keys += ["gradient_accumulation_steps=1", "seed=0"]
    if stage.is_rehearsal:
        keys += [f"tiny_dir={assets}", "adaptive.memory_limit=96MiB"]
    else:
        _write_model(config, assets / "random.pt", stage.device)
        keys += [
            "checkpointer._component_=torchtune.training.FullModelTorchTuneCheckpointer",
            f"checkpointer.checkpoint_dir={assets}",
            "checkpointer.checkpoint_files=[random.pt]",
            "checkpointer.model_type=LLAMA3",
            "tokenizer._component_=torchtune.models.llama2.llama2_tokenizer",
            f"tokenizer.path={assets / TOKENIZER_NAME}",
            "dataset._component_=torchtune.datasets.instruct_dataset",
            "dataset.source=json",
            f"dataset.data_files={assets / DATA_NAME}",
            "dataset.split=train",
        ]
    tune = ["-m", "torchtune._cli.tune", "run", "--nproc_per_node", "1"]
    return [sys.executable, *tune, "adaptive_full_finetune_distributed", "--config", config, *keys]


def _write_model(config: str, path: Path, device: torch.device) -> None:
    """The config's model with random weights."""
    cfg = load_config(config)
    with training.set_default_dtype(torch.bfloat16), device:
        model = instantiate(cfg.model)
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, path)
    del model
    torch.cuda.empty_cache()
    os.sync()

"""Read the log of a run."""

import json
from pathlib import Path
from typing import Any

from torchtune_adaptive.training.run_log import LOG_NAME


def lines_in(output_dir: Path) -> list[dict[str, Any]]:
    """Every line of the log in ``output_dir``."""
    return [json.loads(line) for line in (output_dir / LOG_NAME).read_text().splitlines()]


def events_in(output_dir: Path, name: str) -> list[dict[str, Any]]:
    """The log's events of this name, without the name."""
    lines = [line for line in lines_in(output_dir) if line.get("event") == name]
    return [{key: value for key, value in line.items() if key != "event"} for line in lines]

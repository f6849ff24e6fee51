"""Run one part: ``python -m benchmarks.on_gpu PART OUTPUT SECONDS DIRECTORY``.

A part is a module whose ``measure(stage)`` yields all its sections so far each time that there is more. They are
written to OUTPUT as JSON.
"""

import importlib
import json
import logging
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

from benchmarks.on_gpu.stage import stage_for
from torchtune_adaptive.engine.distributed.snapshot import UnchangedParameters
from torchtune_adaptive.files import write_atomically


def main() -> None:
    """Run the part and exit at once: threads of a process group can abort an interpreter that shuts down."""
    part, output, seconds, directory = sys.argv[1:]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    stage = stage_for(Path(directory), seconds=float(seconds))
    if not stage.has_values:  # nor checksums
        UnchangedParameters.first_changed = lambda self: ""
    for sections in importlib.import_module(f"{__package__}.{part}").measure(stage):
        write_atomically(Path(output), json.dumps([asdict(section) for section in sections]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""``tune-adaptive calibrate``: measure the memory overhead of this machine's GPU for plans."""

import argparse
from pathlib import Path

from torchtune_adaptive.cli.arguments import Commands, add_command, integer


def add_calibrate(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "calibrate",
        "measure the memory overhead of this machine's GPU for plans",
        "calibrate --output h100.json",
        "calibrate --output second.json --device-index 1",
    )
    command.add_argument("--output", required=True, type=Path, help="JSON file to write")
    command.add_argument("--device-index", default="0", help="index of the GPU to measure [0]")
    command.set_defaults(run=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> None:
    from torchtune_adaptive.plan.calibrate import calibrate  # needs torch, which takes seconds to import

    index = integer("device_index", arguments.device_index, minimum=0)
    measured = calibrate(arguments.output, device_index=index)
    print(f"Calibration of {measured.gpu} written to {arguments.output}: {measured}")

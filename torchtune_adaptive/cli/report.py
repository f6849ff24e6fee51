"""``tune-adaptive report``: what happened in a run, in words and pictures."""

import argparse
from pathlib import Path

from torchtune_adaptive.cli.arguments import Commands, add_command
from torchtune_adaptive.files import check_writable, write_atomically, writing
from torchtune_adaptive.report.pictures import pictures
from torchtune_adaptive.report.read import read_run, understanding
from torchtune_adaptive.report.story import story_text
from torchtune_adaptive.report.style import INSTALL, svg_of


def add_report(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "report",
        "show what happened in a run, in words and pictures",
        "report /tmp/torchtune_adaptive/tiny/full",
        "report OUTPUT_DIR --to pictures",
    )
    command.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the `output_dir` of the run")
    command.add_argument("--to", type=Path, metavar="FOLDER", help="folder for the pictures [OUTPUT_DIR]")
    command.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> None:
    run = read_run(arguments.output_dir)
    with understanding(arguments.output_dir):
        text = story_text(run)
    print(text, flush=True)
    try:
        import matplotlib.figure  # noqa: F401  # an extra
    except ImportError:
        print(f"\nWithout matplotlib there are no pictures: {INSTALL} adds it.")
        return
    print()
    folder = arguments.to or arguments.output_dir
    for name, draw in pictures(run).items():
        path = folder / f"{name}.svg"
        with writing("--to", path):
            check_writable(path)  # before seconds are spent on drawing
            with understanding(arguments.output_dir):
                picture = svg_of(draw)
            write_atomically(path, picture)
        print(f"Written to {path}")

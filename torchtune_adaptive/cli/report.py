"""``tune-adaptive report``: what happened in a run, in words and pictures."""

import argparse
from pathlib import Path

from torchtune_adaptive.cli.arguments import Commands, add_command
from torchtune_adaptive.files import check_writable, write_atomically, writing
from torchtune_adaptive.report.page import page
from torchtune_adaptive.report.pictures import pictures
from torchtune_adaptive.report.read import read_run
from torchtune_adaptive.report.story import story, story_text
from torchtune_adaptive.report.style import INSTALL

_PAGE_NAME = "report.html"


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
    command.add_argument("--to", type=Path, metavar="FOLDER", help="folder for pictures and page [OUTPUT_DIR]")
    command.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> None:
    run = read_run(arguments.output_dir)
    print(story_text(run), flush=True)
    try:
        import matplotlib.figure  # noqa: F401  # an extra
    except ImportError:
        print(f"\nWithout matplotlib there are no pictures and no page: {INSTALL} adds it.")
        return
    drawn = pictures(run)
    folder = arguments.to or arguments.output_dir
    with writing("--to", folder / _PAGE_NAME):  # before seconds are spent on drawing
        check_writable(folder / _PAGE_NAME)
    files = {f"{picture.name}.svg": picture.svg() for picture in drawn}
    files[_PAGE_NAME] = page(arguments.output_dir, story(run), drawn)
    print()
    for name, content in files.items():
        with writing("--to", folder / name):
            print(f"Written to {write_atomically(folder / name, content)}")

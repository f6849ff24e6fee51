"""The parser of ``tune-adaptive``, and which function runs a command."""

import argparse
from collections.abc import Sequence
from importlib.metadata import version

import torchtune_adaptive
from torchtune_adaptive.cli.arguments import PROGRAM
from torchtune_adaptive.cli.cp import add_cp
from torchtune_adaptive.cli.fastest import add_fastest, run_fastest
from torchtune_adaptive.cli.plan import add_plan
from torchtune_adaptive.cli.report import add_report
from torchtune_adaptive.cli.search import add_search, run_search
from torchtune_adaptive.settings import named_by_path

_EPILOG = f"""`{PROGRAM} COMMAND --help` has examples of each. Recipes are run by `tune run`.

exit status:
  0   done
  1   a value was refused, or a search failed
  2   the command line is wrong"""


@named_by_path()
def run(arguments: Sequence[str]) -> None:
    """Run the command that the program's arguments name.

    Raises:
        InputError: a value is refused.
        SystemExit: the command line is wrong, help was asked for, or a search has ended the program.
    """
    launching = {"search": run_search, "fastest": run_fastest}  # whose arguments torchtune's own parser reads
    if arguments and arguments[0] in launching and {"-h", "--help"}.isdisjoint(arguments):
        launching[arguments[0]](arguments[1:])
        return
    parsed, others = _parser().parse_known_args(arguments)  # overrides may stand anywhere, as for `tune run`
    if others and ("overrides" not in parsed or any(other.startswith("-") for other in others)):
        parsed.parser.error(f"unrecognized arguments: {' '.join(others)}")
    parsed.overrides = [*vars(parsed).get("overrides", []), *others]
    parsed.run(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="What fits on a GPU, by a plan or a search, and what happened in a run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    versions = f"torchtune {version('torchtune')}, torch {version('torch')}"
    parser.add_argument(
        "--version", action="version", version=f"{PROGRAM} {torchtune_adaptive.__version__} ({versions})"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for add_command in (add_plan, add_search, add_fastest, add_report, add_cp):
        add_command(commands)
    return parser

"""``tune-adaptive``: what fits on a GPU, by a plan or a search, and what happened in a run."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

import torchtune_adaptive
from torchtune_adaptive.cli.arguments import PROGRAM, program
from torchtune_adaptive.cli.cp import add_cp
from torchtune_adaptive.cli.fastest import add_fastest, run_fastest
from torchtune_adaptive.cli.plan import add_plan
from torchtune_adaptive.cli.plan_hugging_face import names_model, plan_model
from torchtune_adaptive.cli.report import add_report
from torchtune_adaptive.cli.search import add_search, run_search
from torchtune_adaptive.settings import named_by_path

_EPILOG = f"""`{PROGRAM} COMMAND --help` has examples of each. Recipes are run by `tune run`.

exit status:
  0   done
  1   a value was refused, or a search failed
  2   the command line is wrong"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program. A refused value ends it with one sentence on standard error and status 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with program(given), named_by_path():
        if names_model(given):
            plan_model(given[1:])
        elif given[:1] in (["search"], ["fastest"]) and {"-h", "--help"}.isdisjoint(given):
            (run_search if given[0] == "search" else run_fastest)(given[1:])  # torchtune's own parser reads the rest
        else:
            _run(given)
    sys.exit(0)


def _run(arguments: Sequence[str]) -> None:
    parser = _parser()
    parsed, others = parser.parse_known_args(arguments)  # overrides may stand anywhere, as for `tune run`
    if others and ("overrides" not in parsed or any(other.startswith("-") for other in others)):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
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


if __name__ == "__main__":
    main()

"""``tune-adaptive``: torchtune's commands with the adaptive recipes, and what fits without a GPU."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

import torchtune_adaptive
from torchtune_adaptive.cli.arguments import PROGRAM, Commands, add_command, examples, reader_may_stop
from torchtune_adaptive.cli.calibrate import add_calibrate
from torchtune_adaptive.cli.plan import add_plan
from torchtune_adaptive.cli.report import add_report
from torchtune_adaptive.cli.search import SEARCH_EXAMPLES, run_search
from torchtune_adaptive.cli.tune import TUNE_COMMANDS, run_tune_command
from torchtune_adaptive.cli.validate import add_validate
from torchtune_adaptive.errors import InputError, reason_of, require_working_directory
from torchtune_adaptive.launch import filter_messages
from torchtune_adaptive.output import escape_unknown_characters
from torchtune_adaptive.settings import named_by_path

_STATUSES = """exit status:
  0   done
  1   a value was refused, or a run failed
  2   the command line is wrong
  75  a run on one process was asked to end by SIGTERM or SIGUSR1, and has saved its state;
      with torchrun's options the status is that of the first process that ends with another one than 0,
      128 more than the signal's number if a signal has ended it, or 1 if the launcher itself got the signal"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program. A refused value ends it with one sentence on standard error and status 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    filter_messages()
    escape_unknown_characters()
    try:
        require_working_directory()
        with named_by_path():
            if given and given[0] in TUNE_COMMANDS:
                run_tune_command(given)
            elif given[:1] == ["search"]:  # torchtune's own parser reads most of its arguments
                run_search(given[1:])
            else:
                _run_own_command(given)
    except InputError as error:
        sys.exit(f"{' '.join([PROGRAM, *given[:1]])}: {error}")
    sys.exit(0)


def _run_own_command(arguments: Sequence[str]) -> None:
    parser = _parser()
    parsed, others = parser.parse_known_args(arguments)  # overrides may stand anywhere, as for `tune run`
    if others and ("overrides" not in parsed or any(other.startswith("-") for other in others)):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    parsed.overrides = [*vars(parsed).get("overrides", []), *others]
    try:
        with reader_may_stop():
            parsed.run(parsed)
    except SystemExit as end:  # of code that the config names
        raise InputError(f"Code of a config must not end the program, but raised {reason_of(end)}.") from end


def _parser() -> argparse.ArgumentParser:
    start = examples(
        "ls",
        "plan --config llama3_2/1B_full --memory 24GiB",
        "run --nproc_per_node 2 adaptive_full_finetune_distributed --config tiny/full use_maximum_batch_size=True",
    )
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="torchtune's commands with the adaptive recipes, and plans of what fits.",
        epilog=f"`{PROGRAM} COMMAND --help` has examples of each.\n\n{start}\n\n{_STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, command in TUNE_COMMANDS.items():  # torchtune's own parsers read their arguments
        _add_unread(commands, name, command.help, *command.examples)
    add_validate(commands)
    add_plan(commands)
    add_calibrate(commands)
    _add_unread(commands, "search", "find the largest batch size that fits, and end", *SEARCH_EXAMPLES)
    add_report(commands)
    return parser


def _add_unread(commands: Commands, name: str, summary: str, *commands_shown: str) -> None:
    """Add a command for the program's help, whose arguments another parser reads."""
    usage, description = f"{PROGRAM} {name} ...", f"{summary[0].upper()}{summary[1:]}."
    add_command(commands, name, summary, *commands_shown, add_help=False, usage=usage, description=description)


def _versions() -> str:
    return f"{PROGRAM} {torchtune_adaptive.__version__} (torchtune {version('torchtune')}, torch {version('torch')})"


if __name__ == "__main__":
    main()

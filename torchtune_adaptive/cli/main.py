"""``tune-adaptive``: plan what fits without a GPU; search for it; calibrate what a GPU adds to a plan.

tune-adaptive plan --config llama3_1/8B_full --nproc_per_node 8 --memory H100 --seq-len 4096,8192 [key=value ...]
tune-adaptive plan --config llama3_1/8B_lora --memory A100-80GB --batch-size 1,2,4,8
tune-adaptive plan --config llama3_1/8B_full --memory H100 --batch-size 4 --modules --plot step.svg
tune-adaptive plan --config llama3_1/8B_full --memory 24GiB,A100-80GB,H100 --nproc_per_node 1,2,4,8
tune-adaptive calibrate --output h100.json
tune-adaptive search --nproc_per_node 2 adaptive_full_finetune_distributed --config tiny/full
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torchtune_adaptive.cli.calibrate import add_calibrate
from torchtune_adaptive.cli.plan import add_plan
from torchtune_adaptive.cli.search import run_search
from torchtune_adaptive.errors import InputError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program. A refused value ends it with one sentence on standard error and status 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["search"]:  # torchtune's own parser reads most of its arguments
        _run(run_search, given[1:], command="search")
    parser = _parser()
    parsed, others = parser.parse_known_args(given)  # overrides may stand anywhere, as for `tune run`
    if others and ("overrides" not in parsed or any(other.startswith("-") for other in others)):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    parsed.overrides = [*vars(parsed).get("overrides", []), *others]
    _run(parsed.run, parsed, command=parsed.command)


def _run(function: Callable[[Any], None], arguments: Any, *, command: str) -> NoReturn:
    try:
        function(arguments)
    except InputError as error:
        sys.exit(f"tune-adaptive {command}: {error}")
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tune-adaptive", description="The largest batch of a torchtune config.")
    commands = parser.add_subparsers(dest="command", required=True)
    add_plan(commands)
    add_calibrate(commands)
    commands.add_parser("search", help="find the largest batch that fits, and end", add_help=False)
    return parser


if __name__ == "__main__":
    main()

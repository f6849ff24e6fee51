"""``tune-adaptive``: what fits on a GPU, by a plan or a search, and what happened in a run. One module per command."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from torchtune_adaptive.cli.arguments import PROGRAM, program
from torchtune_adaptive.cli.plan_hugging_face import names_model, plan_model
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.installed import require_torchtune


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program. A refused value ends it with one sentence on standard error and status 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if names_model(given):  # it needs no torchtune
        with program(given):
            plan_model(given[1:])
        sys.exit(0)
    try:
        require_torchtune()
    except InputError as error:
        sys.exit(f"{PROGRAM}: {error}")
    from torchtune_adaptive.cli.commands import run

    with program(given):
        run(given)
    sys.exit(0)

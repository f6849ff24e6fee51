"""``tune-adaptive``: one module per command."""

import sys
from typing import NoReturn

from torchtune_adaptive.cli.arguments import program
from torchtune_adaptive.cli.plan_hugging_face import names_model, plan_model
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.installed import require_torchtune


def main() -> NoReturn:
    """Run the program, if what it needs is installed."""
    arguments = sys.argv[1:]
    if names_model(arguments):  # it needs no torchtune
        with program(arguments):
            plan_model(arguments[1:])
        sys.exit(0)
    try:
        require_torchtune()
    except InputError as error:
        sys.exit(f"tune-adaptive: {error}")
    from torchtune_adaptive.cli.main import main

    main()

"""``tune-adaptive``: one module per command."""

import sys
from typing import NoReturn

from torchtune_adaptive.errors import InputError
from torchtune_adaptive.stock.installed import require_torchtune


def main() -> NoReturn:
    """Run the program, if what it needs is installed."""
    try:
        require_torchtune()
    except InputError as error:
        sys.exit(f"tune-adaptive: {error}")
    from torchtune_adaptive.cli.main import main

    main()

"""``tune-adaptive``: one module per command."""

from typing import NoReturn

from torchtune_adaptive.stock.installed import require_torchtune


def main() -> NoReturn:
    """Run the program, if what it needs is installed."""
    require_torchtune()
    from torchtune_adaptive.cli.main import main

    main()

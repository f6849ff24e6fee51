"""``python -m torchtune_adaptive.cli``."""

from torchtune_adaptive.cli import main

main()

"""What any PyTorch loop can use: memory, what ranks agree on, recovery, search. It imports torch alone."""

import os
import warnings
from importlib.metadata import version

NEWEST_TESTED_TORCH = (2, 15)


def warn_of_newer_torch() -> None:
    """Give a warning on the first rank of a machine if torch is newer than the one that the tests use."""
    major, minor = version("torch").split(".")[:2]
    if (int(major), int(minor)) > NEWEST_TESTED_TORCH and os.environ.get("LOCAL_RANK", "0") == "0":
        tested = ".".join(map(str, NEWEST_TESTED_TORCH))
        warnings.warn(
            f"torchtune_adaptive is tested up to torch {tested}, but {version('torch')} is installed.", stacklevel=2
        )


warn_of_newer_torch()

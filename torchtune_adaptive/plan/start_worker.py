"""Start ``worker`` without what it does not need: searches for garbage while it imports, and a tidy end.

``python -m torchtune_adaptive.plan.start_worker`` takes the arguments and the input of ``worker``.
"""

import gc
import importlib
import logging
import os
import sys


def main() -> None:
    """Run ``worker``, and end the process with status 0 as soon as it has written its answer."""
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns that it skips kernels, which no plan runs
    gc.disable()  # imports make many objects and hardly any garbage: searching for it took a third of their time
    worker = importlib.import_module(f"{__package__}.worker")
    gc.freeze()
    gc.enable()
    worker.main()
    sys.stderr.flush()
    os._exit(0)  # destroying all modules takes time, and nothing is left to do


if __name__ == "__main__":
    main()

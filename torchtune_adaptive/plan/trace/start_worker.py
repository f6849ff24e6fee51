"""Start ``worker`` faster: without garbage collection during imports, and without the interpreter's shutdown.

``python -m torchtune_adaptive.plan.trace.start_worker`` has the arguments and the input of ``worker``.
"""

import gc
import importlib
import logging
import os
import sys


def main() -> None:
    """Run ``worker``, and end the process with status 0 as soon as it has written its answer."""
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns about missing kernels, which a plan does not run
    gc.disable()  # imports create many objects and hardly any garbage; collecting it took a third of their time
    worker = importlib.import_module(f"{__package__}.worker")
    gc.freeze()
    gc.enable()
    worker.main()
    sys.stderr.flush()
    os._exit(0)  # destroying all modules takes time, and nothing is left to do


if __name__ == "__main__":
    main()

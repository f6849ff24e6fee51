"""Log messages of one rank for all ranks."""

import logging
import os

import torch.distributed as dist


def warn_on_rank_zero(log: logging.Logger, message: str) -> None:
    """Log ``message`` as a warning, on rank 0 only. Without a process group, the launcher's RANK is used."""
    grouped = dist.is_available() and dist.is_initialized()
    if (dist.get_rank() if grouped else int(os.environ.get("RANK", "0"))) == 0:
        log.warning("%s", message)

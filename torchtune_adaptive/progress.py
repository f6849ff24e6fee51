"""Progress bars without a monitor thread."""

from tqdm import tqdm


class Bar(tqdm):
    """A ``tqdm`` without its monitor thread, whose stack needs 8 MiB of memory that the system may limit."""

    monitor_interval = 0

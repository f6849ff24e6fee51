"""Progress bars that take no memory of their own."""

from tqdm import tqdm


class Bar(tqdm):
    """A ``tqdm`` without the thread that watches it, whose stack is 8 MiB of what the system may limit."""

    monitor_interval = 0

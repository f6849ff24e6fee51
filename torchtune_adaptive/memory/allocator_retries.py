"""Tell when an allocator is so short of memory that it gives back its cache step after step: no error, but slow."""

from collections.abc import Callable


class RetryWatch:
    """Counts as thrashing: retries in two optimizer steps in a row, after Composer's rule for CUDA's allocator.

    Args:
        retries: how often the allocator has given back its cache so far to find room.
    """

    def __init__(self, retries: Callable[[], int]) -> None:
        self._retries = retries
        self.start_over()

    def start_over(self) -> None:
        """Forget what was: something has been done about it."""
        self._seen = self._retries()
        self._grew = False

    def stop(self) -> None:
        """From now on nothing counts."""
        self._retries = lambda: 0
        self.start_over()

    def is_thrashing(self) -> bool:
        """Whether there were retries since the last call, and before it too. Ask once in each optimizer step."""
        grew_before, retries = self._grew, self._retries()
        self._grew = retries > self._seen
        self._seen = retries
        return self._grew and grew_before

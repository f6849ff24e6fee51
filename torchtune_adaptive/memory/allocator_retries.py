"""Detect thrashing: the allocator must free its cache in every step. This raises no error, but is slow."""

from collections.abc import Callable


class RetryWatch:
    """Detects allocator retries in two optimizer steps in a row (the rule of Composer).

    Args:
        retries: the total number of times that the allocator has freed its cache to make an allocation possible.
    """

    def __init__(self, retries: Callable[[], int]) -> None:
        self._retries = retries
        self.reset()

    def reset(self) -> None:
        """Ignore all retries so far, for example because the batch has been made smaller."""
        self._retries_before = self._retries()
        self._had_retries = False

    def stop(self) -> None:
        """Ignore all retries from now on."""
        self._retries = lambda: 0
        self.reset()

    def is_thrashing(self) -> bool:
        """Return whether there were retries since the last call and before it. Call once per optimizer step."""
        retries, had_retries = self._retries(), self._had_retries
        self._had_retries = retries > self._retries_before
        self._retries_before = retries
        return self._had_retries and had_retries

"""The prompts of an epoch's turns, from any turn on, for torchtune's PPO training loop."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


class PromptBatches:
    """Iterates as ``loader`` does, and counts batches.

    Args:
        restore_random: called after an epoch's iterator is made, which draws a random number.
    """

    def __init__(self, loader: Any, *, restore_random: Callable[[], None]) -> None:
        self._loader = loader
        self._restore_random = restore_random
        self._done = 0

    @property
    def dataset(self) -> Any:
        """The prompts, by index."""
        return self._loader.dataset

    @property
    def done(self) -> int:
        """Batches of the current epoch so far; 0 between epochs."""
        return self._done

    def __len__(self) -> int:
        return len(self._loader)

    def go_to(self, done: int) -> None:
        """Start the epoch after its first ``done`` batches, which are not read."""
        self._done = done

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        if self._done:
            places = list(loader.sampler)[self._done * loader.batch_size :]
            loader = DataLoader(
                loader.dataset,
                batch_size=loader.batch_size,
                sampler=places,
                collate_fn=loader.collate_fn,
                drop_last=loader.drop_last,
            )
        else:
            self._restore_random()
        batches = iter(loader)
        self._restore_random()
        try:
            for batch in batches:
                self._done += 1
                yield batch
        finally:  # also if the loop ends early
            self._done = 0

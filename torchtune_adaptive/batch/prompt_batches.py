"""The prompts of the turns of an epoch, from any turn on, for a training loop of torchtune."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


class PromptBatches:
    """Iterates as ``loader`` does, and counts.

    Args:
        restore_random: called once an epoch's iterator is made, which draws a number; before that in an epoch's begin.
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
        """Batches that the present epoch has given; 0 between epochs."""
        return self._done

    def __len__(self) -> int:
        return len(self._loader)

    def go_to(self, done: int) -> None:
        """Have the epoch begin after ``done`` batches, which are not read."""
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
        finally:  # also where the loop ends before the epoch does
            self._done = 0

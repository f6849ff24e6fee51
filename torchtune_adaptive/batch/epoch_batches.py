"""The batches of an epoch in a rank's order, from any position on."""

from collections.abc import Iterable, Iterator
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from torchtune_adaptive.batch.row_format import Row


class EpochBatches:
    """Yields batches of a fixed number of rows, and counts them.

    Args:
        sampler: this rank's sampler; its epoch is set here.
    """

    def __init__(self, sampler: Any, rows: int) -> None:
        self._sampler = sampler
        self._done = 0
        self.set_rows(rows)

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return self._rows

    @property
    def done(self) -> int:
        """Batches of the current epoch so far; 0 between epochs."""
        return self._done

    @property
    def data_loader(self) -> StatefulDataLoader:
        """The current epoch's data loader, whose state is saved in torchtune's checkpoints."""
        return self._data_loader

    def set_rows(self, rows: int) -> None:
        """Set the number of rows per batch, between epochs."""
        self._rows = rows
        self._data_loader = self._make_data_loader(self._sampler)

    def go_to(self, done: int) -> None:
        """Start the next epoch after its first ``done`` batches, which are not read."""
        self._done = done

    def begin(self, epoch: int) -> Iterator[list[Row]]:
        """The remaining batches of ``epoch``. Makes the data loader's iterator at once, which draws a random number."""
        self._sampler.set_epoch(epoch)
        if self._done:
            self._data_loader = self._make_data_loader(list(self._sampler)[self._done * self._rows :])
        elif self._data_loader.sampler is not self._sampler:
            self._data_loader = self._make_data_loader(self._sampler)
        return self._counted(iter(self._data_loader))

    def end(self) -> None:
        """End the epoch, even if batches remain."""
        self._done = 0

    def places(self, epoch: int) -> list[int]:
        """The data set's indices of this rank's rows, in the order of ``epoch``."""
        self._sampler.set_epoch(epoch)
        return list(self._sampler)

    def _counted(self, batches: Iterator[list[Row]]) -> Iterator[list[Row]]:
        for batch in batches:
            self._done += 1
            yield batch

    def _make_data_loader(self, places: Iterable[int]) -> StatefulDataLoader:
        """As in torchtune, samples at the end that do not fill a batch are dropped."""
        rows: Any = self._rows
        return StatefulDataLoader(
            self._sampler.dataset, batch_size=rows, sampler=places, collate_fn=list, drop_last=True
        )

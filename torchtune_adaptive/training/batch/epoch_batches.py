"""The batches of an epoch in a rank's order, from any position on."""

from collections.abc import Iterable, Iterator
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from torchtune_adaptive.training.batch.row_format import Row


class EpochBatches:
    """Yields batches of a fixed number of rows, and counts them.

    Args:
        sampler: this rank's sampler; its epoch is set here.
    Attributes:
        rows: rows of a batch.
        done: batches of the current epoch so far; 0 between epochs.
        data_loader: the current epoch's data loader, whose state is saved in torchtune's checkpoints.
    """

    def __init__(self, sampler: Any, rows: int) -> None:
        self._sampler = sampler
        self.done = 0
        self.set_rows(rows)

    def set_rows(self, rows: int) -> None:
        """Set the number of rows per batch, between epochs."""
        self.rows = rows
        self.data_loader = self._make_data_loader(self._sampler)

    def go_to(self, done: int) -> None:
        """Start the next epoch after its first ``done`` batches, which are not read; 0 after the end of an epoch."""
        self.done = done

    def begin(self, epoch: int) -> Iterator[list[Row]]:
        """The remaining batches of ``epoch``. Makes the data loader's iterator at once, which draws a random number."""
        self._sampler.set_epoch(epoch)
        if self.done:
            self.data_loader = self._make_data_loader(list(self._sampler)[self.done * self.rows :])
        elif self.data_loader.sampler is not self._sampler:
            self.data_loader = self._make_data_loader(self._sampler)
        return self._counted(iter(self.data_loader))

    def indices(self, epoch: int) -> list[int]:
        """The data set's indices of this rank's rows, in the order of ``epoch``."""
        self._sampler.set_epoch(epoch)
        return list(self._sampler)

    def _counted(self, batches: Iterator[list[Row]]) -> Iterator[list[Row]]:
        for batch in batches:
            self.done += 1
            yield batch

    def _make_data_loader(self, indices: Iterable[int]) -> StatefulDataLoader:
        """As in torchtune, samples at the end that do not fill a batch are dropped."""
        rows: Any = self.rows
        return StatefulDataLoader(
            self._sampler.dataset, batch_size=rows, sampler=indices, collate_fn=list, drop_last=True
        )

"""Components that a config can name, whose code would end the process."""

import os
import sys
from typing import Any

from torchtune.datasets import instruct_dataset
from torchtune.modules import loss
from torchtune.training.metric_logging import DiskLogger


def end() -> None:
    """End the process, on the rank ``ENDING_RANK`` if that is set."""
    if os.environ.get("RANK", "0") == os.environ.get("ENDING_RANK", os.environ.get("RANK", "0")):
        sys.exit("no more\ndata")


class Samples:
    """A data set that ends when it is read, but not at its first sample, which is read in the set-up."""

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        self._samples = instruct_dataset(tokenizer, **options)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: int) -> Any:
        if place > 0:
            end()
        return self._samples[place]


class StoppingSamples(Samples):
    """A data set that ends the iteration over it."""

    def __getitem__(self, place: int) -> Any:
        if place > 0:
            raise StopIteration
        return self._samples[place]


def samples(tokenizer: Any, **options: Any) -> Any:
    end()
    return instruct_dataset(tokenizer, **options)


class CEWithChunkedOutputLoss(loss.CEWithChunkedOutputLoss):  # a name that torchtune's recipes know
    def forward(self, *arguments: Any, **options: Any) -> Any:
        end()
        return super().forward(*arguments, **options)


class Logger(DiskLogger):
    def log_dict(self, payload: Any, step: int) -> None:
        end()
        super().log_dict(payload, step)


def grow_later(epoch: int, current_batch_size: int) -> int:
    if epoch:
        end()
    return 0


class Growth:
    def __init__(self) -> None:
        end()

"""Loaders over small data sets."""

import random
from typing import Any

from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from torchtune_adaptive.training.batch.loader import GlobalStepLoader, StepLoader
from torchtune_adaptive.training.batch.row_format import TokenRows


def step_loader(
    dataset: Any,
    *,
    batch_size: int = 4,
    micro_steps: int = 1,
    is_global: bool = False,
    max_steps_per_epoch: int | None = None,
    ranks: int = 1,
    rank: int = 0,
    shuffle: bool = False,
    longest: int | None = None,
) -> StepLoader:
    """The loader of ``rank``; ``is_global``: of a global batch, which has no micro-steps of its own."""
    sampler = StatefulDistributedSampler(dataset, ranks, rank, shuffle=shuffle, seed=3)
    options: dict[str, Any] = {"batch_size": batch_size, "max_steps_per_epoch": max_steps_per_epoch, "longest": longest}
    if is_global:
        return GlobalStepLoader(sampler, TokenRows(-100), **options)
    return StepLoader(sampler, TokenRows(-100), micro_steps=micro_steps, **options)


class Augmented:
    """Samples of which each reading replaces a token, by a generator of the data set's own."""

    def __init__(self, tokenizer: Any, **_: Any) -> None:
        self._random = random.Random(0)

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = [3 + index, *range(20, 40 + index)]
        tokens[self._random.randrange(len(tokens))] = 3
        return {"tokens": tokens, "labels": list(tokens)}

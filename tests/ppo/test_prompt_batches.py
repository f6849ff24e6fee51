"""The prompts of a turn are those of torchtune's own data loader, from any turn on."""

from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, DistributedSampler

from torchtune_adaptive.ppo.checkpoints import PromptBatches

PROMPTS = list(range(11))


def batches_of(*, epoch: int = 0, restore_random: Callable[[], None] = lambda: None) -> PromptBatches:
    sampler = DistributedSampler(PROMPTS, num_replicas=1, rank=0, shuffle=True)  # pyright: ignore[reportArgumentType]
    sampler.set_epoch(epoch)
    loader = DataLoader(PROMPTS, batch_size=2, sampler=sampler, drop_last=True)  # pyright: ignore[reportArgumentType]
    return PromptBatches(loader, restore_random=restore_random)


def taken(batches: PromptBatches) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_an_epoch_resumed_after_any_batch_has_the_same_remaining_batches() -> None:
    for epoch in (0, 3):
        whole = taken(batches_of(epoch=epoch))
        assert len(whole) == 5
        for done in range(6):
            batches = batches_of(epoch=epoch)
            batches.done = done
            assert taken(batches) == whole[done:]
            assert taken(batches) == whole  # the next epoch begins with its first batch


def test_batches_are_counted_until_the_epoch_ends_or_is_left() -> None:
    batches = batches_of()
    batches.done = 1
    assert [batches.done for _ in batches] == [2, 3, 4, 5]
    assert batches.done == 0
    for _ in batches:
        break
    assert batches.done == 0


def test_generators_are_restored_before_an_epoch_and_within_one_once_its_iterator_is_made() -> None:
    """Making an iterator draws a random number."""
    before = torch.get_rng_state()
    for done, made_before in ((0, [False, True]), (2, [True])):
        states: list[torch.Tensor] = []
        torch.set_rng_state(before)
        batches = batches_of(restore_random=lambda states=states: states.append(torch.get_rng_state()))
        batches.done = done
        next(iter(batches))
        assert [not torch.equal(state, before) for state in states] == made_before

"""With ``reduce="last"``, FSDP2 reduces gradients once per optimizer step, as plain gradient accumulation does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.faults import fsdp_settings, same_bits, tensors_of, under
from tests.support.ranks import run_on_ranks
from torchtune_adaptive import CannotRecoverError, InputError, RecoverableStep
from torchtune_adaptive.engine.recovery.backoff import Backoff
from torchtune_adaptive.testing import Fault, wrap_micro_steps

ROWS, STEPS, WIDTH = 8, 3, 16
LARGE, SMALL = 4, 2  # rows of a micro-batch
FAULTS = ((0, 0), (0, 30), (0, 75), (1, 1), (1, 40), (1, 90))  # micro-step, place


class Training:
    """A few optimizer steps under FSDP2, plain or with recovery."""

    def __init__(self, *, bf16: bool = False) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
        self.model: Any = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
        options: Any = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if bf16 else {}
        for part in [*layers, self.model]:
            fully_shard(part, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        torch.manual_seed(1 + dist.get_rank())

    def micro_step(self, rows: torch.Tensor) -> torch.Tensor:
        loss = self.model(rows).float().square().sum() / ROWS
        loss.backward()
        return loss.detach()

    def plain(self, *sizes: int) -> list[torch.Tensor]:
        """The final state after steps with micro-batches of these sizes."""
        for number, size in enumerate(sizes):
            parts = self.rows(number).split(size)
            for micro_step, rows in enumerate(parts, start=1):
                self.model.set_requires_gradient_sync(micro_step == len(parts))
                self.micro_step(rows)
            self._update()
        return [tensor.clone() for tensor in tensors_of(self.model, self.optimizer)]

    def recoverable(self, size: int = LARGE, micro_step: Any = None) -> RecoverableStep[torch.Tensor]:
        options: Any = {"micro_batch_size": size, "optimizer": self.optimizer, "reduce": "last"}
        return RecoverableStep(self.model, micro_step or self.micro_step, on_event=lambda event: None, **options)

    def recovering(self, size: int, fault: tuple[int, int] | None = None, *, step: int = 0) -> list[torch.Tensor]:
        """The same with recovery, and a fault of rank 1 in a micro-step of a step, at a place."""
        recoverable = self.recoverable(size)
        for number in range(STEPS):
            faults = {fault[0]: Fault(fault[1], ranks=[1])} if fault and number == step else {}
            wrap_micro_steps(recoverable, partial(under, faults))
            recoverable.backoff = Backoff()  # which does not try larger micro-batches again
            recoverable(self.rows(number))
            self._update()
        assert len(recoverable.events) == (fault is not None)
        recoverable.close()
        return [tensor.clone() for tensor in tensors_of(self.model, self.optimizer)]

    def rows(self, number: int) -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _compared(rank: int) -> dict[str, bool]:
    """What is equal, bit for bit, to plain accumulation. Before a fault in the last step, steps have none."""
    found = {}
    for bf16 in (False, True):
        small = Training(bf16=bf16).plain(*[SMALL] * STEPS)
        plain = Training(bf16=bf16).plain(*[ROWS] * STEPS)
        found[f"without a fault, bf16 {bf16}"] = same_bits(plain, Training(bf16=bf16).recovering(ROWS))
        for fault in FAULTS[bf16::2]:
            found[f"fault {fault}, bf16 {bf16}"] = same_bits(small, Training(bf16=bf16).recovering(LARGE, fault))
        later = Training(bf16=bf16).recovering(LARGE, FAULTS[-1], step=2)
        plain = Training(bf16=bf16).plain(LARGE, LARGE, SMALL)
        found[f"fault in the last step, bf16 {bf16}"] = same_bits(plain, later)
    return found


def _collectives(rank: int) -> tuple[list[set[str]], list[bool]]:
    """The kinds of collectives in both expected, and whether FSDP2's settings are as before after steps.

    Of these the second ends with an error in its first micro-step.
    """
    training = Training()
    step = training.recoverable()
    training.model(torch.ones(1, WIDTH))  # sets FSDP2 up
    before = fsdp_settings(training.model)
    step(training.rows(0))
    are_as_before = [fsdp_settings(training.model) == before]
    training._update()
    wrap_micro_steps(step, _fail)
    with pytest.raises(KeyError):
        step(training.rows(0))
    are_as_before.append(fsdp_settings(training.model) == before)
    recovery: Any = step._recovery
    return [{one.kind for one in expected} for expected in recovery._ledger.expected], are_as_before


def _fail(number: int, run: Callable[[], Any]) -> Any:
    raise KeyError("the user's own mistake")


def _uneven(rank: int) -> tuple[str, bool]:
    """The error if ranks have different numbers of micro-steps, and whether training continues as if it was not."""
    training = Training()
    step = training.recoverable()
    step.dry_run(training.rows(0))
    with pytest.raises(InputError) as raised:
        step(training.rows(0)[: 4 + 4 * rank])
    step(training.rows(0))
    training._update()
    return str(raised.value), same_bits(tensors_of(training.model, training.optimizer), Training().plain(LARGE))


def _not_last(rank: int) -> str:
    """Why there is no recovery if micro-steps call ``set_is_last_backward(False)``."""
    training = Training()

    def micro_step(rows: torch.Tensor) -> torch.Tensor:
        training.model.set_is_last_backward(False)
        return training.micro_step(rows)

    with pytest.raises(CannotRecoverError) as raised:
        training.recoverable(micro_step=micro_step)(training.rows(0))
    return str(raised.value)


def _on_two(rank: int) -> tuple[Any, ...]:
    return _compared(rank), _collectives(rank), _uneven(rank), _not_last(rank)


@pytest.fixture(scope="module")
def on_two() -> tuple[Any, ...]:
    """What the ranks have found, by scenario."""
    return tuple(zip(*run_on_ranks(_on_two, 2), strict=True))


def test_it_equals_plain_accumulation_bit_for_bit_with_faults_and_without(on_two: Any) -> None:
    for found in on_two[0]:
        assert [what for what, is_equal in found.items() if not is_equal] == []


def test_only_the_last_micro_step_reduces(on_two: Any) -> None:
    for (others, last), are_as_before in on_two[1]:
        assert others == {"all-gather"}
        assert last == {"all-gather", "reduce-scatter"}
        assert are_as_before == [True, True]


def test_different_numbers_of_micro_steps_are_an_error_on_every_rank(on_two: Any) -> None:
    assert on_two[2] == (("Ranks must have equally many micro-steps, but one has 1 and another 2.", True),) * 2


def test_set_is_last_backward_is_refused(on_two: Any) -> None:
    for sentence in on_two[3]:
        assert sentence.endswith("will end the run: a micro-step ends after `set_is_last_backward(False)`.")

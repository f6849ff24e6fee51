"""Under a system limit on the memory of a process, a search finds a size that the process can really train with."""

import os
import platform
import resource
from logging.handlers import BufferingHandler

import pytest
import torch
from torch import nn

from benchmarks.peers.rfc import is_out_of_memory
from benchmarks.process_limit import data_bytes
from tests.ranks import run_on_ranks
from torchtune_adaptive import SearchResult, find_max_batch_size
from torchtune_adaptive.memory import process_limits
from torchtune_adaptive.memory.process_limits import held_back, room_bytes

MIB = 2**20
WORDS, WIDTH, TOKENS = 2**14, 256, 2**12  # an activation of a row is 4 MiB
ROOM = 240 * MIB  # of which parameters, their gradients and the optimizer's state are 64
METERED = 8 * 2**30
# The limits are those of Linux, and glibc keeps freed blocks; the shell may have set limits before.
pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or room_bytes() is not None, reason="needs glibc, and no limits of the shell"
)


def limit_data(more_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + more_bytes, resource.RLIM_INFINITY))


class Training:
    """An embedding of 16 MiB and AdamW, in a process that may use ``ROOM`` bytes more than before."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # a thread's stack counts
        torch.manual_seed(0)
        self._use(nn.Linear(2, 2))
        self.step(torch.ones(1, 2))  # makes the allocations that PyTorch makes only once
        limit_data(ROOM)
        self._use(nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.GELU()))
        self.step(self.batch(1))  # makes the optimizer's state, of which a search keeps a copy

    def _use(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())

    def batch(self, rows: int) -> torch.Tensor:
        return torch.randint(WORDS, (rows, TOKENS))

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def survives(self, rows: int) -> bool:
        return not any(is_out_of_memory(self.step, self.batch(rows)) for _ in range(3))

    def find(self, margin: float) -> SearchResult:
        return find_max_batch_size(
            self.step,
            self.batch,
            model=self.model,
            optimizer=self.optimizer,
            memory_limit=METERED,
            margin=margin,
        )


def search_and_train(_: int, margin: float) -> tuple[int, bool, list[int]]:
    training = Training()
    found = training.find(margin)
    failed = [probe.batch_size for probe in found.probes if not probe.fits]
    return found.batch_size, training.survives(found.batch_size), failed


def train(_: int, rows: int) -> bool:
    training = Training()
    with held_back(0.0, enough_bytes=METERED):
        return training.survives(rows)


def test_a_search_is_exact_where_no_copy_of_the_state_would_fit() -> None:
    [(found, survives, failed)] = run_on_ranks(search_and_train, 1, 0.0)
    assert survives
    assert max(failed) <= found + 4  # the limit is known before it is reached
    assert [run_on_ranks(train, 1, rows) for rows in (found, found + 2)] == [[True], [False]]
    [(with_margin, survives, _)] = run_on_ranks(search_and_train, 1, 0.3)
    assert survives
    assert 1 < with_margin < 0.85 * found


def room_by_limits(_: int) -> list[int | None]:
    rooms = [room_bytes()]
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        resource.setrlimit(limit, (2**40, resource.RLIM_INFINITY))
        rooms.append(room_bytes())
    return [*rooms, 2**40 - data_bytes()]


def test_the_room_is_what_the_tightest_limit_leaves() -> None:
    [(unlimited, by_addresses, by_both, by_data)] = run_on_ranks(room_by_limits, 1)
    assert unlimited is None
    assert 0 < by_addresses < by_data  # a process has more addresses than data
    assert by_both == by_addresses


def kept_of_freed_blocks(
    _: int, limits: dict[int, int], environment: dict[str, str], enough_bytes: int = 2**60
) -> tuple[int, list[str]]:
    """The bytes still held after 64 of 65 blocks of 1 MiB are freed, and what is logged."""
    logged = BufferingHandler(100)
    process_limits.log.addHandler(logged)
    os.environ.update(environment)
    for limit, nbytes in limits.items():
        resource.setrlimit(limit, (nbytes, resource.RLIM_INFINITY))
    for _ in range(2):
        with held_back(0.0, enough_bytes=enough_bytes):
            pass
    torch.empty(24 * MIB, dtype=torch.uint8)  # when it is freed, glibc raises its threshold
    before, blocks = data_bytes(), [torch.empty(MIB, dtype=torch.uint8) for _ in range(65)]
    del blocks[:-1]
    return data_bytes() - before, [line.getMessage() for line in logged.buffer]


def test_without_a_limit_the_allocator_stays_as_it_is() -> None:
    [(kept_bytes, lines)] = run_on_ranks(kept_of_freed_blocks, 1, {}, {})
    assert kept_bytes > 60 * MIB
    assert lines == []


def test_a_limit_that_leaves_more_than_is_asked_for_changes_nothing() -> None:
    [(kept_bytes, lines)] = run_on_ranks(kept_of_freed_blocks, 1, {resource.RLIMIT_DATA: 2**45}, {}, 2**44)
    assert kept_bytes > 60 * MIB
    assert lines == []


def limits_inside_and_after(_: int) -> tuple[bool, int, int, bool]:
    limit_data(100 * MIB)
    (before, _hard), room = resource.getrlimit(resource.RLIMIT_DATA), room_bytes()
    assert room is not None
    with held_back(0.25, enough_bytes=METERED) as is_limited:
        inside = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return is_limited, before - inside, room, resource.getrlimit(resource.RLIMIT_DATA)[0] == before


def test_the_margin_below_a_limit_is_reserved_and_then_released() -> None:
    [(is_limited, held_bytes, room, is_as_before)] = run_on_ranks(limits_inside_and_after, 1)
    assert is_limited
    assert held_bytes == pytest.approx(0.25 * room, abs=MIB)
    assert is_as_before


def on_two_ranks(rank: int) -> tuple[int, bool]:
    training = Training()
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found = training.find(0.0)
    return found.batch_size, training.survives(found.batch_size)


def test_the_limit_of_one_rank_is_that_of_all() -> None:
    [(first, first_survives), (second, second_survives)] = run_on_ranks(on_two_ranks, 2)
    assert first == second > 1
    assert first_survives
    assert second_survives


def test_with_a_limit_freed_memory_is_returned_at_once_which_is_logged_once() -> None:
    limits = {resource.RLIMIT_DATA: 64 * 2**30, resource.RLIMIT_AS: 2**40}
    [(kept_bytes, [line])] = run_on_ranks(kept_of_freed_blocks, 1, limits, {})
    assert kept_bytes < 2 * MIB
    assert "RLIMIT_DATA of 64.0 GiB and RLIMIT_AS of 1024.0 GiB" in line


def test_a_threshold_that_the_user_has_set_is_kept() -> None:
    limits = {resource.RLIMIT_DATA: 64 * 2**30}
    for environment in (
        {"MALLOC_MMAP_THRESHOLD_": "33554432"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"},
    ):
        [(_, lines)] = run_on_ranks(kept_of_freed_blocks, 1, limits, environment)
        assert lines == []

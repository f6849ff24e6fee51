"""The CUDA meter, tested with a fake of the caching allocator."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.toys import search_options
from tests.training.test_step_log import RESULT, Parts
from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.cuda_meter import CudaMeter
from torchtune_adaptive.engine.memory.devices import describe_peak
from torchtune_adaptive.engine.memory.phases import Phases
from torchtune_adaptive.engine.recovery.watch import PressureWatch
from torchtune_adaptive.engine.search.find import search

DEVICE = torch.device("cuda:0")
TOTAL = 100_000


class FakeCuda:
    """A fake caching allocator whose statistics ``torch.cuda`` returns.

    Freed memory stays reserved. If an allocation would exceed the limit, the cache is freed first (a retry). If that is
    not enough, the allocation runs out of memory.
    """

    def __init__(self, *, total_bytes: int = TOTAL, outside_bytes: int = 0) -> None:
        self.total_bytes, self.outside_bytes = total_bytes, outside_bytes
        self.fraction = 1.0
        self.fractions: list[float] = []
        self.allocated = self.reserved = 0
        self.allocated_peak = self.reserved_peak = 0
        self.retries = self.peak_resets = 0

    def take(self, nbytes: int) -> None:
        allowed = min(int(self.fraction * self.total_bytes), self.total_bytes - self.outside_bytes)
        if max(self.reserved, self.allocated + nbytes) > allowed and self.allocated + nbytes > self.reserved:
            self.retries += 1
            self.empty_cache()
        if self.allocated + nbytes > max(allowed, self.reserved):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        self.allocated += nbytes
        self.reserved = max(self.reserved, self.allocated)
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def give(self, nbytes: int) -> None:
        self.allocated -= nbytes

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    # ---- what torch.cuda returns

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.total_bytes - self.outside_bytes - self.reserved, self.total_bytes

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.allocated_peak}},
            "num_alloc_retries": self.retries,
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.reserved_peak}},
        }

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak_resets += 1
        self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        assert device.index is not None  # torch refuses a device without index
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        assert device.index is not None
        assert isinstance(fraction, float)  # torch raises a TypeError for an int
        assert 0 <= fraction <= 1
        self.fraction = fraction
        self.fractions.append(fraction)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in (
        "mem_get_info",
        "memory_reserved",
        "memory_stats_as_nested_dict",
        "reset_peak_memory_stats",
        "get_per_process_memory_fraction",
        "set_per_process_memory_fraction",
    ):
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


@pytest.fixture
def meter(cuda: FakeCuda) -> CudaMeter:
    made = CudaMeter(DEVICE)
    made.reset()
    return made


# ---- available bytes


def test_memory_outside_the_allocator_is_not_available(cuda: FakeCuda, meter: CudaMeter) -> None:
    cuda.outside_bytes = 30_000
    cuda.take(20_000)
    cuda.give(15_000)
    assert meter.available_bytes == 70_000  # free, cached and used by this process


def test_without_a_limit_a_message_says_what_is_available_now_which_may_be_less_than_the_peak(
    cuda: FakeCuda, meter: CudaMeter
) -> None:
    cuda.take(80_000)
    cuda.give(70_000)
    cuda.outside_bytes = 30_000
    assert describe_peak(meter) == "peak 78.1 KiB, now 68.4 KiB available"
    meter.limit_bytes = 80_000
    assert describe_peak(meter) == "peak 78.1 KiB, limit 78.1 KiB"


# ---- the limit


def test_the_fraction_set_before_is_restored_also_after_an_exception(cuda: FakeCuda, meter: CudaMeter) -> None:
    cuda.fraction = 0.75
    meter.limit_bytes = 25_000
    meter.start_timeline()
    with pytest.raises(torch.OutOfMemoryError), meter:
        cuda.take(25_001)
    assert cuda.fraction == 0.75
    torch.zeros(1)  # no dispatch mode is left behind
    assert len(meter.stop_timeline(1).operations) == 0


@pytest.mark.parametrize(
    ("before", "limit_bytes", "inside", "after"),
    [
        (0.75, None, 0.75, 0.75),
        (1.0, 25_000, 0.25, 1.0),
        (0.5, 90_000, 0.5, 0.5),  # never more than the user has set
        (1.0, 3 * TOTAL, 1.0, 1.0),
        (214748364.8, 25_000, 0.25, 1.0),  # of the backend cudaMallocAsync without a limit
    ],
)
def test_the_limit_is_the_allocators_own_only_while_metering(
    cuda: FakeCuda, meter: CudaMeter, before: float, limit_bytes: int | None, inside: float, after: float
) -> None:
    cuda.fraction = before
    meter.limit_bytes = limit_bytes
    assert cuda.fractions == []
    with meter:
        assert cuda.fraction == inside
    assert cuda.fraction == after
    assert bool(cuda.fractions) == (limit_bytes is not None)


# ---- peaks


def test_the_peak_is_of_reserved_bytes_and_phases_of_allocated_bytes(cuda: FakeCuda, meter: CudaMeter) -> None:
    with meter:
        meter.enter_phase("forward")
        cuda.take(1000)
        cuda.give(800)
        meter.enter_phase("backward")
        cuda.take(300)
        cuda.give(400)
        meter.enter_phase("optimizer")
        cuda.take(50)
        meter.enter_phase("forward")  # again: its highest peak stays
    assert meter.phase_peak_bytes == {"": 0, "forward": 1000, "backward": 500, "optimizer": 150}
    assert meter.peak_bytes == 1000
    assert meter.phase_peak_bytes["optimizer"] == 150  # reading changes nothing


def test_the_reserved_peak_survives_the_resets_between_phases(cuda: FakeCuda, meter: CudaMeter) -> None:
    cuda.take(5000)
    cuda.give(5000)
    meter.enter_phase("forward")
    cuda.empty_cache()
    meter.enter_phase("backward")
    cuda.take(100)
    assert meter.peak_bytes == 5000


def test_reset_forgets_peaks_phases_and_retries(cuda: FakeCuda, meter: CudaMeter) -> None:
    meter.enter_phase("forward")
    cuda.take(5000)
    cuda.give(4000)
    cuda.retries = 3
    assert meter.allocator_retries == 3
    meter.reset()
    cuda.empty_cache()
    meter.reset()
    assert meter.allocator_retries == 0
    assert meter.peak_bytes == 1000
    assert meter.phase_peak_bytes == {"": 1000}
    cuda.retries += 1
    assert meter.allocator_retries == 1


def take_and_give(cuda: FakeCuda, nbytes: int) -> None:
    """A step that needs ``nbytes`` of the fake card, and leaves nothing."""
    cuda.take(nbytes)
    cuda.give(nbytes)
    cuda.empty_cache()


def test_training_leaves_the_devices_own_peaks_alone(cuda: FakeCuda) -> None:
    """They are the user's: for example ``torch.cuda.max_memory_allocated`` after some steps."""
    meter = CudaMeter(DEVICE, exact=False)
    watch = PressureWatch(Consensus(), meter, Phases([], meter))
    parts = Parts(meter=meter)
    log = parts.log()
    for step, nbytes in enumerate([5000, 900], start=1):
        meter.enter_phase("forward")
        take_and_give(cuda, nbytes)
        log.write(step, RESULT, samples=4, epoch=0, seconds=1.0)
        watch.reset()  # as after a change of the micro-batch
    assert cuda.peak_resets == 0
    assert {step: figures["peak_memory_bytes"] for step, figures in parts.logger.steps.items()} == {1: 5000, 2: 5000}
    assert meter.peak_bytes == 5000


def test_the_peak_of_training_contains_no_probe_before_or_within_it(cuda: FakeCuda) -> None:
    meter = CudaMeter(DEVICE, exact=False)
    with meter.exactly():
        take_and_give(cuda, 70_000)
    assert meter.peak_bytes == 0
    take_and_give(cuda, 900)
    with meter.exactly():
        meter.reset()  # each probe does
        take_and_give(cuda, 80_000)
    assert meter.peak_bytes == 900
    take_and_give(cuda, 1000)
    assert meter.peak_bytes == 1000


def test_an_allocator_without_statistics_yet_has_no_peaks(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda device: {}
    )  # what torch gives before its first use
    meter = CudaMeter(DEVICE)
    meter.reset()
    assert (meter.peak_bytes, meter.allocator_retries, meter.phase_peak_bytes) == (0, 0, {"": 0})


# ---- timelines


class Kernels(TorchDispatchMode):
    """Each operation has a workspace of 500 bytes on the fake card while it runs, and memory for a new result."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._cuda.take(500)
        self._cuda.give(500)
        result = func(*args, **(kwargs or {}))
        if not func._schema.is_mutable:
            self._cuda.take(result.nbytes)
        return result


def test_a_timeline_has_every_operations_peak_including_the_workspace_of_its_kernel_from_its_start_to_its_stop(
    cuda: FakeCuda, meter: CudaMeter
) -> None:
    with meter:
        torch.zeros(1)
    meter.start_timeline()
    with Kernels(cuda), meter:
        kept = torch.zeros(200)  # 800 bytes
        kept.add_(1)
        torch.cat([kept, kept])
    timeline = meter.stop_timeline(2)
    assert timeline.operations == ("aten.zeros.default", "aten.add_.Tensor", "aten.cat.default")
    assert timeline.live_bytes == (800, 1300, 2400)
    assert meter.peak_bytes == 2400
    with meter:
        torch.zeros(1)
    assert meter.stop_timeline(2).operations == ()


# ---- a search with the meter


def test_a_search_is_not_misled_by_a_cache_that_loading_the_model_has_left_full_and_restores_the_card(
    cuda: FakeCuda, meter: CudaMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtune_adaptive.engine.loop.free_memory", lambda device: cuda.empty_cache())
    cuda.take(50_000)  # a whole checkpoint
    cuda.give(47_500)  # of which this rank keeps its shard
    loop = Loop(
        micro_step=lambda batch: (cuda.take(1000 * len(batch)), cuda.give(1000 * len(batch))),
        model=nn.Linear(1, 1),
        optimizers=[],
        device=torch.device("cpu"),
        meter=meter,
        consensus=Consensus(),
    )
    options = search_options(memory_limit_bytes=40_000, strategy="binary_search")
    found = search(loop, lambda rows: [torch.ones(rows)], options, start=1, bound=1000)
    assert found.exact_batch_size == 37
    assert [probe.peak_bytes for probe in found.probes if probe.fits and probe.batch_size == 37] == [39_500]
    assert (cuda.fraction, cuda.allocated) == (1.0, 2500)

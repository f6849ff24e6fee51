"""How much host memory a machine needs while a run loads, searches, trains and saves.

Not counted: checkpoint files. They are memory-mapped, and the system can drop them from its page cache.
Counted: tensors that torchtune copies when it converts a checkpoint, offloaded tensors, the search's copies, the
tensors that rank 0 gathers to save, and each process itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

_MIB = 2**20
# Each rank's Python with all modules that a recipe imports: 290 MiB of anonymous memory measured on a CPU
# (benchmarks/results/host_memory_cpu.md), rounded up. The memory of data sets is not known.
PROCESS_BYTES = 320 * _MIB
# What CUDA adds to it: 1122 MiB (github.com/pytorch/pytorch/issues/12873, before kernels were loaded at their first
# use). It has not been measured here.
CUDA_PROCESS_BYTES = 1122 * _MIB


def pinned_bytes(num_bytes: int) -> int:
    """Bytes that torch's allocator of pinned memory allocates for ``num_bytes``: the next power of two.

    See ``CachingHostAllocator.h``; its ``pinned_max_round_threshold_mb`` would change it.

    >>> pinned_bytes(4096), pinned_bytes(4097), pinned_bytes(0)
    (4096, 8192, 0)
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


@dataclass(frozen=True, kw_only=True)
class HostFigures:
    """What the host memory of a run depends on: figures of a config's models and optimizers, in bytes.

    Attributes:
        weights, frozen_weights: weights of the trained model, and of all others, over all ranks.
        load_copies, frozen_load_copies: the part of these that every rank copies when it converts checkpoints.
        save_copies: the part of ``weights`` that rank 0 copies when it converts a checkpoint.
        local: a rank's parameters and buffers.
        trained: the part of ``local`` that is trained, and all buffers.
        state, whole_state: optimizer state of a rank, and over all ranks.
        offloaded_weights: a rank's pinned parameters, if they are kept in host memory.
        offloaded: what a rank keeps in host memory in all steps: parameters, gradients and optimizer state.
        activations: the number of offloaded activations, by their bytes per token.
    """

    weights: int = 0
    frozen_weights: int = 0
    load_copies: int = 0
    frozen_load_copies: int = 0
    save_copies: int = 0
    local: int = 0
    trained: int = 0
    state: int = 0
    whole_state: int = 0
    offloaded_weights: int = 0
    offloaded: int = 0
    activations: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_flat(cls, figures: Mapping[str, int]) -> "HostFigures":
        """Build the figures from one flat dictionary, which has the entries of ``activations`` too.

        >>> HostFigures.from_flat({"weights": 8, "4096": 32}).activations
        {'4096': 32}
        """
        activations = {name: count for name, count in figures.items() if name.isdecimal()}
        return cls(
            **{name: value for name, value in figures.items() if name not in activations}, activations=activations
        )

    def activation_bytes(self, num_tokens: int) -> int:
        """Pinned host memory of the offloaded activations of a micro-step with ``num_tokens`` tokens."""
        return sum(count * pinned_bytes(int(size) * num_tokens) for size, count in self.activations.items())


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """Host memory of a machine with ``ranks`` ranks, rank 0 among them.

    Attributes:
        process_bytes: memory of all processes, without their tensors.
        tensor_bytes: tensors by stage of a run. "search again" is the search of a resumed run or during training.
        file_bytes: checkpoint files in the page cache, which are not counted.
        temporary_file_bytes: disk space for the search's copies of tensors in host memory.
    """

    ranks: int
    process_bytes: int
    tensor_bytes: dict[str, float]
    file_bytes: int
    temporary_file_bytes: int

    @property
    def peak_bytes(self) -> float:
        """Peak of processes and tensors."""
        return self.process_bytes + max(self.tensor_bytes.values())


def plan_host(
    figures: HostFigures,
    *,
    world_size: int,
    ranks: int,
    on_cpu: bool,
    saves_state: bool,
    saves_in_background: bool,
    step_bytes: float,
    num_tokens: int,
) -> HostPlan:
    """Plan the host memory of a run. A micro-step has ``num_tokens`` tokens and needs ``step_bytes`` of a rank.

    What rank 0 gathers is that of torchtune's recipes for several ranks. On one device they need at most as much.

    Args:
        world_size, ranks: number of ranks of the run, and of the machine.
        on_cpu: whether the ranks compute on the CPU, in host memory.
        saves_state: whether torchtune's checkpoints before the last epoch include optimizer state.
        saves_in_background: whether checkpoints are written from copies while training continues.
    """
    loaded = figures.local if on_cpu else figures.offloaded_weights
    in_steps = step_bytes if on_cpu else figures.offloaded + figures.activation_bytes(num_tokens)
    # Pinned memory is kept for the next step. On a CPU activations are freed.
    after_steps = figures.local + figures.state if on_cpu else in_steps
    # The search copies tensors in host memory to a temporary file, not to memory.
    to_file = on_cpu or figures.offloaded_weights > 0
    copied, copied_state = (0, 0) if to_file else (figures.trained, figures.state)
    shares_weights = on_cpu and world_size == 1
    gathered = figures.save_copies + (0 if shares_weights else figures.weights)
    gathered += figures.whole_state if saves_state and not shares_weights else 0
    staged = ranks * (figures.trained + figures.state) if saves_in_background else 0
    return HostPlan(
        ranks=ranks,
        process_bytes=ranks * (PROCESS_BYTES + (0 if on_cpu else CUDA_PROCESS_BYTES)),
        tensor_bytes={
            "loading": ranks * (loaded + figures.load_copies + figures.frozen_load_copies),
            "search": ranks * (in_steps + copied),
            "search again": ranks * (in_steps + copied + copied_state),
            "training": ranks * in_steps,
            "saving": ranks * after_steps + max(gathered, staged),
        },
        file_bytes=figures.weights + figures.frozen_weights,
        temporary_file_bytes=ranks * (figures.trained + figures.state) if to_file else 0,
    )

"""Every allocation of one train step, with its bytes, kind, module and lifetime."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

Kind: TypeAlias = Literal[
    "parameters",
    "frozen models",
    "gradients",
    "optimizer state",
    "other tensors",
    "gathered parameters",
    "activations",
    "temporaries",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
BEFORE_STEP = -1


class Operation(NamedTuple):
    """An operation of the step, the phase that it ran in, and the module that ran it."""

    name: str
    phase: str
    module: str


class Allocation(NamedTuple):
    """``num_bytes`` of one storage, live after the operations with numbers ``made`` to ``freed`` - 1.

    ``made`` is ``BEFORE_STEP`` if it existed before the step. ``freed`` is None if it exists after the step.
    """

    num_bytes: int
    kind: str
    module: str
    made: int
    freed: int | None


class Change(NamedTuple):
    """A storage that grows by ``change_bytes`` in operation number ``operation``."""

    operation: int
    storage: int
    change_bytes: int


def allocations_of(
    changes: Iterable[Change], *, kinds: Mapping[int, str], modules: Mapping[int, str], num_operations: int
) -> list[Allocation]:
    """The allocations of storages with these changes, which are in order. Changes after the step are ignored.

    A resized storage is a new allocation. A storage that is allocated and freed within one operation is none.
    Args:
        kinds: by storage; only those in ``KINDS`` are on the device.
        modules: by storage.
    """
    held: dict[int, tuple[int, int]] = {}  # by storage: first operation, and bytes
    found: list[Allocation] = []

    def end(storage: int, freed: int | None) -> int:
        made, num_bytes = held.pop(storage, (BEFORE_STEP, 0))
        if num_bytes and made != freed and kinds[storage] in KINDS:
            found.append(Allocation(num_bytes, kinds[storage], modules[storage], made, freed))
        return num_bytes

    for operation, storage, change_bytes in changes:
        if operation >= num_operations:
            break
        held[storage] = operation, end(storage, operation) + change_bytes
    for storage in list(held):
        end(storage, None)
    return sorted(found, key=lambda one: one.made)


@dataclass(frozen=True)
class StepEvents:
    """The operations and allocations of a step with ``batch_size`` rows of ``seq_len`` tokens, in order."""

    batch_size: int
    seq_len: int
    operations: tuple[Operation, ...]
    allocations: tuple[Allocation, ...]

    @cached_property
    def live_bytes(self) -> dict[str, list[int]]:
        """Live bytes of each kind after every operation, without kinds that the step does not have."""
        changes = {kind: [0] * (len(self.operations) + 1) for kind in KINDS}
        for num_bytes, kind, _, made, freed in self.allocations:
            changes[kind][max(made, 0)] += num_bytes
            if freed is not None:
                changes[kind][freed] -= num_bytes
        live = {kind: list(accumulate(change[:-1])) for kind, change in changes.items()}
        return {kind: values for kind, values in live.items() if any(values)}

    @cached_property
    def total_bytes(self) -> list[int]:
        """Live bytes of all kinds after every operation."""
        return [sum(values) for values in zip(*self.live_bytes.values(), strict=True)]

    @property
    def peak_bytes(self) -> int:
        """The most live bytes."""
        return max(self.total_bytes)

    @property
    def peak_at(self) -> int:
        """Number of the first operation with the most live bytes."""
        return self.total_bytes.index(self.peak_bytes)

    def live_after(self, operation: int) -> list[Allocation]:
        """The allocations that are live after operation number ``operation``."""
        return [
            one for one in self.allocations if one.made <= operation and (one.freed is None or operation < one.freed)
        ]

    def as_json(self) -> dict[str, Any]:
        """The events as JSON values. Names are indices into a list."""
        numbers: dict[str, int] = {}

        def number(name: str) -> int:
            return numbers.setdefault(name, len(numbers))

        operations = [[number(name) for name in operation] for operation in self.operations]
        allocations = [
            [one.num_bytes, number(one.kind), number(one.module), one.made, one.freed] for one in self.allocations
        ]
        return {
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "names": list(numbers),
            "operations": operations,
            "allocations": allocations,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "StepEvents":
        """The events from the value of ``as_json``."""
        names: list[str] = content["names"]

        def name(number: int) -> str:
            return names[number]

        return cls(
            content["batch_size"],
            content["seq_len"],
            tuple(Operation(*map(name, numbers)) for numbers in content["operations"]),
            tuple(
                Allocation(num_bytes, name(kind), name(module), made, freed)
                for num_bytes, kind, module, made, freed in content["allocations"]
            ),
        )

"""The state of each rank: its random generators, and the values that differ between ranks."""

from collections.abc import Sequence
from typing import Any

import torch

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.snapshot import RandomStates


class RankStates:
    """Gathers the state that differs between ranks, and restores each rank's own."""

    def __init__(
        self, consensus: Consensus, device: torch.device, *, generators: Sequence[torch.Generator] = ()
    ) -> None:
        """With the states of ``generators`` beside those of the default ones."""
        self._consensus = consensus
        self._device = device
        self._generators = generators
        self._random: dict[str, Any] | None = None

    def now(self, **own: Any) -> list[dict[str, Any]]:
        """The random generators' states and ``own`` of each rank. A collective."""
        random = self._random or RandomStates(self._device, self._generators).state_dict()
        return self._consensus.from_all_ranks(own | {"random": random})

    def load(self, saved: list[dict[str, Any]]) -> dict[str, Any] | None:
        """This rank's ``own`` from a saved state; None if there were fewer ranks. ``restore`` sets its generators."""
        if self._consensus.rank >= len(saved):
            return None
        own = saved[self._consensus.rank]
        self._random = own["random"]
        return own

    def restore(self) -> None:
        """Set the random generators to the loaded states. Only the first call has an effect."""
        if self._random is not None:
            states = RandomStates(self._device, self._generators)
            states.load_state_dict(self._random)
            states.restore()
            self._random = None

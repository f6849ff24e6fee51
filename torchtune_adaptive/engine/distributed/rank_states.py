"""The state of each rank: its random generators, and the values that differ between ranks."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.snapshot import RandomStates


@dataclass(eq=False)
class RankStates:
    """Gathers the state that differs between ranks, and restores each rank's own.

    Attributes:
        generators: further ones, whose states are kept beside those of the default ones.
    """

    consensus: Consensus
    device: torch.device
    _: KW_ONLY
    generators: Sequence[torch.Generator] = ()
    _random: dict[str, Any] | None = field(default=None, init=False)

    def now(self, **own: Any) -> list[dict[str, Any]]:
        """The random generators' states and ``own`` of each rank. A collective."""
        random = self._random or RandomStates(self.device, self.generators).state_dict()
        return self.consensus.from_all_ranks(own | {"random": random})

    def load(self, saved: list[dict[str, Any]]) -> dict[str, Any] | None:
        """This rank's ``own`` from a saved state; None if there were fewer ranks. ``restore`` sets its generators."""
        if self.consensus.rank >= len(saved):
            return None
        own = saved[self.consensus.rank]
        self._random = own["random"]
        return own

    def restore(self) -> None:
        """Set the random generators to the loaded states. Only the first call has an effect."""
        if self._random is not None:
            states = RandomStates(self.device, self.generators)
            states.load_state_dict(self._random)
            states.restore()
            self._random = None

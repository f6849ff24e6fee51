"""torchtune's context for the forward pass, which may offload activations."""

from contextlib import AbstractContextManager
from typing import Any


class Activations:
    """The context for the forward pass. It can be created again, because a failed step makes it unusable.

    Args:
        context: torchtune's context; it keeps a step's tensors while it offloads activations.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context = context

    def renew(self) -> None:
        """Create the context again, and drop the tensors that it kept."""
        self._context = type(self._context)()

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._context.__exit__(*error)

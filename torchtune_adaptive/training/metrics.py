"""A metric logger whose failures do not end the run."""

from collections.abc import Mapping
from typing import Any

from torchtune import utils

from torchtune_adaptive.errors import reason_of

log = utils.get_logger("DEBUG")


class TolerantLogger:
    """A metric logger of torchtune whose failures cost metrics, but not the run.

    It warns of the first step that is not logged, and says when logging works again.

    Args:
        logger: torchtune's, or the user's own.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._lost_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """As torchtune; an error is logged."""
        try:
            self._logger.log_dict(payload, step=step)
        except Exception as error:  # of any service or file system
            if not self._lost_steps:
                log.warning(f"Metrics of step {step} are not logged: {reason_of(error)}. Training continues.")
            self._lost_steps += 1
            return
        if self._lost_steps:
            log.warning(f"Metrics are logged again from step {step} on; {self._lost_steps} steps are missing.")
            self._lost_steps = 0

    def close(self) -> None:
        """As torchtune; an error is logged."""
        try:
            self._logger.close()
        except Exception as error:  # the run is complete
            log.warning(f"The metric logger could not be closed: {reason_of(error)}.")

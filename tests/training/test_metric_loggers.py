"""No failing logger ends a run."""

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torchtune.training.metric_logging import DiskLogger

from torchtune_adaptive.training.metrics import TolerantLogger


class Failing:
    """A logger that fails at the steps ``fails_at``, and when it is closed."""

    def __init__(self, *fails_at: int) -> None:
        self.fails_at = fails_at
        self.logged: list[int] = []

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        if step in self.fails_at:
            raise ConnectionError("the service is down")
        self.logged.append(step)

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_logger_that_fails_loses_steps_but_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(2, 3)
    logger = TolerantLogger(failing)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            logger.log_dict({"loss": 1.0}, step=step)
        logger.close()
    assert failing.logged == [1, 4, 5]
    assert caplog.messages == [
        "Metrics of step 2 are not logged: ConnectionError: the service is down. Training continues.",
        "Metrics are logged again from step 4 on; 2 steps are missing.",
        "The metric logger could not be closed: OSError: [Errno 28] No space left on device.",
    ]


def test_other_attributes_are_those_of_the_wrapped_logger(tmp_path: Path) -> None:
    disk = DiskLogger(str(tmp_path), filename="log.txt")
    logger = TolerantLogger(disk)
    assert logger.path_to_log_file() == tmp_path / "log.txt"
    logger.log_config(OmegaConf.create({"output_dir": str(tmp_path)}))
    assert (tmp_path / "torchtune_config.yaml").exists()
    logger.close()

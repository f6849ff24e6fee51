"""Every metric reaches each of torchtune's loggers with its name, step and value; no failing logger ends a run."""

import ast
import json
import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from omegaconf import OmegaConf
from torchtune.training import memory, metric_logging
from torchtune.training.metric_logging import DiskLogger, StdoutLogger, TensorBoardLogger

from tests.training.test_step_log import RESULT, Parts
from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.training import distillation, preference
from torchtune_adaptive.training.metrics import METRICS, TolerantLogger, metrics_table

REPOSITORY = Path(__file__).parents[2]
# Among them a number of bytes that a 32-bit float cannot hold, and values of a diverged run.
STEPS: dict[int, dict[str, float]] = {
    step: {name: place + step / 4 for place, name in enumerate(METRICS)}
    | {"peak_memory_bytes": 85_899_345_921 + step, "oom_retries": step, "grad_norm": math.nan, "loss": math.inf}
    for step in (1, 20)
}


def log_all(logger: Any) -> None:
    for step, metrics in STEPS.items():
        logger.log_dict(metrics, step=step)


def same(one: object, other: float, *, relative: float = 0.0) -> bool:
    value = float(str(one))
    return (math.isnan(value) and math.isnan(other)) or math.isclose(value, other, rel_tol=relative)


def check(logged: Mapping[int, Mapping[str, Any]], *, relative: float = 0.0) -> None:
    assert {step: set(metrics) for step, metrics in logged.items()} == {step: set(METRICS) for step in STEPS}
    for step, metrics in STEPS.items():
        wrong = {
            name: logged[step][name]
            for name in metrics
            if not same(logged[step][name], metrics[name], relative=relative)
        }
        assert wrong == {}


def read_lines(text: str) -> dict[int, dict[str, str]]:
    lines = [re.fullmatch(r"Step (\d+) \| (.*) ", line) for line in text.splitlines()]
    return {int(line[1]): dict(pair.rsplit(":", 1) for pair in line[2].split()) for line in lines if line}


# ---- the names


def names_in(module: Any) -> set[str]:
    """The keys of dictionaries in the source of ``module``."""
    tree = ast.parse(Path(module.__file__).read_text())
    dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    return {str(key.value) for node in dicts for key in node.keys if isinstance(key, ast.Constant)}


def test_every_metric_of_a_step_has_its_place_in_the_table() -> None:
    parts = Parts(meter=CpuMeter())
    parts.log().write(1, replace(RESULT, grad_norm=0.5), epoch=0, seconds=1.0)
    named = {"max_tokens_per_micro_batch", "gradient_noise_scale"}
    by_method = names_in(preference) | names_in(distillation)
    by_torchtune = {name for name in names_in(memory) if name.startswith("peak_memory")}
    assert by_torchtune == {"peak_memory_active", "peak_memory_alloc", "peak_memory_reserved"}
    assert set(parts.logger.steps[1]) | named | by_method | by_torchtune == set(METRICS)
    assert all(type(value) in (int, float) for value in parts.logger.steps[1].values())


def test_the_documented_table_is_that_of_the_code() -> None:
    assert metrics_table() in (REPOSITORY / "docs" / "output.md").read_text()


# ---- torchtune's loggers


def test_disk(tmp_path: Path) -> None:
    logger = DiskLogger(str(tmp_path), filename="log.txt")
    log_all(logger)
    logger.close()
    check(read_lines((tmp_path / "log.txt").read_text()))
    again = DiskLogger(str(tmp_path), filename="log.txt")
    again.log_dict({"loss": 0.5}, step=21)
    again.close()
    assert read_lines((tmp_path / "log.txt").read_text())[21] == {"loss": "0.5"}


def test_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    log_all(StdoutLogger())
    check(read_lines(capsys.readouterr().out))


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_keeps_seven_digits(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    for _ in range(2):  # the second run gets a folder of its own
        logger = TensorBoardLogger(str(tmp_path))
        log_all(logger)
        logger.close()
    folders = list(tmp_path.iterdir())
    assert len(folders) == 2
    for folder in folders:
        read = events.EventAccumulator(str(folder)).Reload()
        logged: dict[int, dict[str, float]] = {}
        for name in read.Tags()["tensors"]:
            for event in read.Tensors(name):
                logged.setdefault(event.step, {})[name] = event.tensor_proto.float_val[0]
        check(logged, relative=2**-24)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    logged: dict[int, dict[str, Any]] = {}
    for _ in range(2):
        logger: Any = metric_logging.WandBLogger(project="test", log_dir=str(tmp_path), mode="offline")
        for step, metrics in STEPS.items():
            logger.log_dict(metrics, step=step)
            summary = logger._wandb.run.summary
            deadline = time.monotonic() + 60
            while summary.get("global_step") != step and time.monotonic() < deadline:
                time.sleep(0.05)
            logged[step] = {name: summary[name] for name in METRICS}
        logger.close()
        del logger  # when collected, torchtune's logger ends the current run, which must not be the next one
        check(logged)
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_comet_offline(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml", reason="Comet is not installed")
    options: Any = {"offline_directory": str(tmp_path)}
    logger = metric_logging.CometLogger(online=False, log_code=False, **options)
    log_all(logger)
    logger.close()
    (archive,) = tmp_path.glob("*.zip")
    lines = ZipFile(archive).read("messages.json").decode().splitlines()
    sent = [message["payload"]["metric"] for message in map(json.loads, lines) if message["type"] == "metric_msg"]
    logged: dict[int, dict[str, Any]] = {}
    for metric in sent:
        if metric["metricName"] in METRICS:
            logged.setdefault(metric["step"], {})[metric["metricName"]] = metric["metricValue"]
    check(logged)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_mlflow_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more than mlflow-skinny
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path / "comet"))  # once imported, it logs MLflow's runs too
    for _ in range(2):
        logger = metric_logging.MLFlowLogger(experiment_name="test", tracking_uri=f"file:{tmp_path}/mlflow")
        log_all(logger)
        logger.close()
        client = mlflow.MlflowClient()
        logged: dict[int, dict[str, Any]] = {}
        for name in METRICS:
            for one in client.get_metric_history(logger._run_id, name):
                logged.setdefault(one.step, {})[name] = one.value
        check(logged)


# ---- loggers that fail


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

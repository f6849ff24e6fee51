"""Runs launched by ``tune run`` that a test watches, holds, ends by a signal, and compares with uninterrupted ones.

Linux only: processes are found and identified by ``/proc``.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune.training.metric_logging import MetricLoggerInterface

from tests.support.checkout import environment
from torchtune_adaptive.training.checkpoints.folder import CheckpointFolder

# Matters only when something hangs: a machine that others use too may be very slow.
LONGEST_WAIT_S = 600.0
_POLL_S = 0.002
# Figures that differ between two equal runs.
_OF_THE_CLOCK = {"time", "mfu", "peak_memory_bytes", "host_memory_bytes"} | {
    f"tokens_per_second_per_gpu{part}" for part in ("", "_trajectory", "_ppo")
}

Step = dict[str, float]


class ExactLogger(MetricLoggerInterface):
    """Writes each step's figures as a line of JSON, every bit of them, into a new file of ``log_dir``.

    After step N the run waits while there is a file of that name with "_hold_N".
    """

    def __init__(self, log_dir: str, **_: Any) -> None:
        self._path = _log_file(Path(log_dir), _logs_in(Path(log_dir)))
        self._file = self._path.open("w")

    def log(self, name: str, data: Any, step: int) -> None:
        raise AssertionError("recipes log dictionaries")

    def log_config(self, config: DictConfig) -> None: ...

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        figures = {"step": step, "time": time.time()} | {name: float(value) for name, value in payload.items()}
        self._file.write(json.dumps(figures) + "\n")
        self._file.flush()
        deadline = time.monotonic() + LONGEST_WAIT_S
        while _hold(self._path, step).exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._file.close()


def _log_file(directory: Path, number: int) -> Path:
    return directory / f"steps_{number}.jsonl"


def _logs_in(directory: Path) -> int:
    return len(list(directory.glob("steps_*.jsonl")))


def _hold(log_file: Path, step: int) -> Path:
    return log_file.with_name(f"{log_file.stem}_hold_{step}")


@dataclass(frozen=True)
class Setup:
    """A recipe, its number of ranks and its config.

    Attributes:
        kind: full or lora.
        ranks: 1: the recipe for a single device, unless ``is_distributed``.
        overrides: of the config, by dotted keys.
    """

    name: str
    kind: str
    ranks: int
    overrides: Mapping[str, object]
    is_distributed: bool = False

    @property
    def recipe(self) -> str:
        """The name of the recipe for ``tune run``."""
        single = self.ranks == 1 and not self.is_distributed
        return f"adaptive_{self.kind}_finetune_{'single_device' if single else 'distributed'}"

    @property
    def epochs(self) -> int:
        """The epochs of the run."""
        return int(str(self.overrides["epochs"]))

    @property
    def grows(self) -> bool:
        """Whether its batch may grow."""
        return any(key.startswith("batch_increase_function") for key in self.overrides)


class _Process:
    """A process that is never confused with a later one of the same id."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = _stat(pid)[19] if _stat(pid) else ""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; a zombie does not."""
        stat = _stat(self.pid)
        return bool(stat) and stat[19] == self._started and stat[0] not in "ZX"

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if self.is_alive:
                os.kill(self.pid, number)


class Run:
    """A run of ``setup`` in ``directory``: checkpoints go to its ``out``, logs to ``logs``. A subclass starts it.

    Args:
        assets: where the model and its data are.
        holds: steps after which the run waits for ``release``.
        recipe: instead of the setup's.
    """

    def __init__(
        self,
        setup: Setup,
        assets: Path,
        directory: Path,
        *,
        holds: Sequence[int] = (),
        recipe: str | None = None,
    ) -> None:
        self.out = directory / "out"
        self._logs = directory / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._steps_path = _log_file(self._logs, _logs_in(self._logs))
        for step in holds:
            _hold(self._steps_path, step).touch()
        self._output_path = directory / f"output_{len(list(directory.glob('output_*')))}"
        self._environment = environment(HF_HUB_OFFLINE="1")
        overrides = {
            "tiny_dir": assets,
            "output_dir": self.out,
            "metric_logger._component_": "tests.support.crash_runs.ExactLogger",
            "metric_logger.log_dir": self._logs,
            "resume_from_checkpoint": "auto",
        }
        # What `tune run` gets after its own options.
        self._arguments = [recipe or setup.recipe, "--config", f"tiny/{setup.kind}"]
        self._arguments += [f"{key}={value}" for key, value in (overrides | dict(setup.overrides)).items()]

    @property
    def output(self) -> str:
        """What the run has printed so far."""
        return self._output_path.read_text(errors="replace")

    @property
    def steps(self) -> list[Step]:
        """What it has logged so far."""
        if not self._steps_path.exists():
            return []
        return [json.loads(line) for line in self._steps_path.read_text().splitlines(keepends=True) if line[-1] == "\n"]

    @property
    def step(self) -> int:
        """The last optimizer step that it has logged; 0 before the first one."""
        steps = self.steps
        return int(steps[-1]["step"]) if steps else 0

    @property
    def checkpoints(self) -> list[str]:
        """The names of the complete checkpoints, in the order in which they were written."""
        return [one.path.name for one in CheckpointFolder(self.out).checkpoints()]

    @property
    def resumed_from(self) -> str:
        """The name of the checkpoint from which it resumed."""
        names = [line.rpartition("/")[2] for line in self.output.splitlines() if line.startswith("Resuming from")]
        return names[-1] if names else "the beginning"

    def is_held(self, step: int) -> bool:
        """Whether it waits, or will wait, after ``step``."""
        return _hold(self._steps_path, step).exists()

    def release(self, step: int) -> None:
        """Let the run continue after ``step``."""
        _hold(self._steps_path, step).unlink()


class Launch(Run):
    """A ``Run`` by ``tune run``.

    Args:
        options: of the launcher, instead of those for one node.
        enter: words before the command, which run it elsewhere.
        others: of ``Run``.
    """

    def __init__(
        self,
        setup: Setup,
        assets: Path,
        directory: Path,
        *,
        options: Sequence[str] = (),
        enter: Sequence[str] = (),
        **others: Any,
    ) -> None:
        super().__init__(setup, assets, directory, **others)
        command = [*enter, str(Path(sys.executable).parent / "tune"), "run"]
        command += options or (["--nproc_per_node", str(setup.ranks)] if setup.ranks > 1 else [])
        with self._output_path.open("w") as output:
            self._launcher = subprocess.Popen(
                [*command, *self._arguments],
                cwd=directory,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._known = {self._launcher.pid: _Process(self._launcher.pid)}
        self._ranks = setup.ranks

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has ended."""
        return self._launcher.poll() is not None

    @property
    def processes(self) -> list[_Process]:
        """Those that run, the launcher first. A rank whose launcher has ended is included if it was seen before."""
        stats = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
        parents = {pid: int(stat[1]) for pid, stat in stats.items() if stat}
        while new := {pid for pid, parent in parents.items() if parent in self._known} - self._known.keys():
            self._known |= {pid: _Process(pid) for pid in new}
        return [one for one in self._known.values() if one.is_alive]

    def ranks(self) -> list[_Process]:
        """The processes that train."""
        living = self.processes
        return living if self._ranks == 1 else [one for one in living if one.pid != self._launcher.pid]

    def send(self, number: signal.Signals) -> None:
        """Send the launcher a signal; for a single device it is the process that trains."""
        self._known[self._launcher.pid].send(number)

    def send_all(self, number: signal.Signals) -> None:
        """Send launcher and ranks a signal at the same moment."""
        for process in self.processes:
            process.send(number)

    def kill(self) -> None:
        """End launcher and ranks at the same moment, as a loss of power does, and wait until none is left."""
        deadline = time.monotonic() + LONGEST_WAIT_S
        for process in self._known.values():  # known ones first: to look for others takes time
            process.send(signal.SIGKILL)
        while self.processes and time.monotonic() < deadline:
            self.send_all(signal.SIGKILL)
            time.sleep(_POLL_S)
        self._launcher.wait(timeout=LONGEST_WAIT_S)

    def wait(self) -> int:
        """Wait for the end of launcher and ranks, and return the launcher's exit status."""
        self.wait_until(lambda: False, poll_s=0.02)
        status = self._launcher.wait(timeout=LONGEST_WAIT_S)
        self.wait_for_ranks()
        return status

    def wait_for_ranks(self) -> None:
        """Wait for the end of all ranks that were seen."""
        deadline = time.monotonic() + LONGEST_WAIT_S
        while any(one.is_alive for one in self._known.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        assert not self.processes, f"still running: {[one.pid for one in self.processes]}\n{self.output[-3000:]}"

    def wait_until(self, condition: Callable[[], object], *, poll_s: float = _POLL_S) -> bool:
        """Wait for ``condition`` or the launcher's end, and return whether the condition holds."""
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not condition():
            if self.has_ended:
                return bool(condition())
            assert time.monotonic() < deadline, f"nothing happened\n{self.output[-3000:]}"
            time.sleep(poll_s)
        return True

    def wait_for_start(self) -> None:
        """Wait until there are as many processes as ranks."""
        is_started = self.wait_until(lambda: len(self.ranks()) >= self._ranks, poll_s=0.05)
        assert is_started, f"ended at once\n{self.output[-3000:]}"

    def wait_for_step(self, step: int) -> None:
        """Wait until ``step`` is logged."""
        assert self.wait_until(lambda: self.step >= step), f"ended before step {step}\n{self.output[-3000:]}"

    def wait_for_words(self, words: str) -> None:
        """Wait until ``words`` are printed."""
        assert self.wait_until(lambda: words in self.output), f"never said {words!r}\n{self.output[-3000:]}"


@contextmanager
def launched(setup: Setup, assets: Path, directory: Path, **options: Any) -> Iterator[Launch]:
    """A ``Launch`` whose processes are all killed at the end."""
    launch = Launch(setup, assets, directory, **options)
    try:
        yield launch
    finally:
        launch.kill()


def finished(setup: Setup, assets: Path, directory: Path, **options: Any) -> Launch:
    """A ``Launch`` that has trained to the end."""
    with launched(setup, assets, directory, **options) as run:
        run.wait_for_start()
        status = run.wait()
    assert status == 0, run.output[-5000:]
    return run


def _stat(pid: int) -> list[str]:
    """What ``/proc/PID/stat`` has after the name: state, parent, ...; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


@dataclass(frozen=True)
class Moment:
    """When a run is struck (killed or signalled): ``delay_s`` after it has logged ``step`` and fulfils ``writing``.

    Attributes:
        writing: "step" or "epoch": the next of these checkpoints is being written. "": any time.
    """

    step: int
    delay_s: float
    writing: str = ""

    def wait(self, run: Launch) -> bool:
        """Wait for the moment, and return whether it came before the end of ``run``."""
        if not run.wait_until(lambda: run.step >= self.step):
            return False
        if not self.writing:
            time.sleep(self.delay_s)
            return not run.has_ended
        delay_s = self.delay_s
        while run.wait_until(lambda: self._is_writing(run)):
            time.sleep(delay_s)
            if self._is_writing(run):
                return True
            delay_s /= 2  # the checkpoint was complete sooner
        return False

    def _is_writing(self, run: Launch) -> bool:
        with suppress(FileNotFoundError):
            return any(name.startswith(f"unfinished_{self.writing}_") for name in os.listdir(run.out))
        return False


@dataclass(frozen=True)
class Case:
    """A run that is struck, which means killed.

    Attributes:
        writing: as in ``Moment``.
        strikes: how often it is killed and then resumed, if so much is left to train.
    """

    number: int
    setup: Setup
    writing: str
    strikes: int

    def moment(self, strike: int, *, after: int, reference: "Reference") -> Moment:
        """A random moment of a run that begins after step ``after``; it depends only on the case and the arguments."""
        chance = random.Random(f"{self.number}/{strike}")
        last = reference.last_step - 2
        if strike + 1 < self.strikes:
            last = (after + last) // 2  # leaves enough steps for the next strike
        first = max(after, 1)
        if self.writing and strike == 0:
            last -= reference.steps_per_save("step") if self.writing == "step" else 0
            return Moment(chance.randint(0, max(last, 0)), chance.uniform(0, 0.030), self.writing)
        return Moment(chance.randint(first, max(last, first)), chance.uniform(0, reference.seconds_per_step))


@dataclass(frozen=True)
class Reference:
    """What an uninterrupted run has logged, and its last weights."""

    steps: list[Step]
    weights: dict[str, dict[str, torch.Tensor]]
    epochs: int

    @property
    def last_step(self) -> int:
        """The last step of the run."""
        return int(self.steps[-1]["step"])

    @property
    def seconds_per_step(self) -> float:
        """The mean time of a step, checkpoints included."""
        return (self.steps[-1]["time"] - self.steps[0]["time"]) / (len(self.steps) - 1)

    def steps_per_save(self, kind: str) -> int:
        """The most steps from one checkpoint of ``kind`` to the next."""
        return 3 if kind == "step" else -(-self.last_step // self.epochs) + 1

    def difference(self, run: Run) -> str:
        """The first difference in the logged steps or the last weights of a resumed run; "" if there is none."""
        steps = run.steps
        is_trained = run.resumed_from == f"step_{self.last_step}"  # only the last epoch's weights were not saved
        wanted = self.steps[int(steps[0]["step"]) - 1 :] if steps else []
        if len(wanted) != len(steps) or bool(steps) == is_trained:
            return f"{len(steps)} steps logged after {run.resumed_from}"
        if found := step_difference(wanted, steps):
            return found
        weights = last_weights(run.out, self.epochs)
        if weights.keys() != self.weights.keys():
            return f"files {sorted(weights)}, not {sorted(self.weights)}"
        for file, tensors in self.weights.items():
            if weights[file].keys() != tensors.keys():
                return f"other tensors in {file}"
            for name, tensor in tensors.items():
                if not torch.equal(weights[file][name], tensor):
                    return f"{name} in {file}"
        return ""


def step_difference(wanted: Sequence[Step], steps: Sequence[Step]) -> str:
    """The first difference between what two runs have logged of the same steps; "" if there is none."""
    for one, other in zip(wanted, steps, strict=False):
        names = (one.keys() | other.keys()) - _OF_THE_CLOCK
        for name in sorted(names):
            if one.get(name) != other.get(name):
                return f"{name} of step {one['step']}: {other.get(name)!r}, not {one.get(name)!r}"
    return ""


def last_weights(out: Path, epochs: int) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each file of weights after the last epoch, by the file's path."""
    files = [path for path in out.rglob(f"epoch_{epochs - 1}/*") if path.suffix in (".bin", ".pt")]
    return {str(path.relative_to(out)): torch.load(path, weights_only=True) for path in files}


def reference_of(setup: Setup, assets: Path, directory: Path) -> Reference:
    """The uninterrupted run of ``setup``."""
    run = finished(setup, assets, directory)
    reference = Reference(run.steps, last_weights(run.out, setup.epochs), setup.epochs)
    assert reference.weights, list(run.out.iterdir())
    return reference


def strike(case: Case, reference: Reference, assets: Path, directory: Path) -> list[str]:
    """Kill a run at its moments, resume it each time by the same command, and compare the last one: what is wrong."""
    problems, setup, done, last = list[str](), case.setup, 0, None
    for number in range(case.strikes):
        run, is_struck = _struck_run(setup, case.moment(number, after=done, reference=reference), assets, directory)
        if not is_struck:
            assert number, "ended before it was struck"
            last = run
            break
        steps = run.steps
        if found := step_difference(reference.steps[int(steps[0]["step"]) - 1 :] if steps else [], steps):
            problems.append(f"before strike {number + 1}: {found}")
        done = run.step
        if missing := _lost_steps(setup, run, done):
            problems.append(missing)
    last = last or finished(setup, assets, directory)
    if "resumed with changes" in last.output:
        problems.append("a change was noticed, though there is none")
    if left := [path.name for path in last.out.glob("unfinished_*")]:
        problems.append(f"left behind: {left}")
    if found := reference.difference(last):
        problems.append(found)
    return problems


def _struck_run(setup: Setup, moment: Moment, assets: Path, directory: Path) -> tuple[Launch, bool]:
    """A run and whether it was killed at ``moment``, or earlier if its checkpoints are written sooner than expected."""
    for _ in range(10):
        with launched(setup, assets, directory) as run:
            run.wait_for_start()
            is_struck = moment.wait(run)
            assert is_struck or run.wait() == 0, run.output[-3000:]
        if is_struck or not moment.writing:
            return run, is_struck
        shutil.rmtree(directory)
        moment = replace(moment, step=moment.step // 2, delay_s=moment.delay_s / 4)
    raise AssertionError("ten runs ended before they could be killed while they wrote a checkpoint")


def _lost_steps(setup: Setup, run: Launch, done: int) -> str:
    """The problem, if the checkpoints that a killed run has left are older than they may be; else ""."""
    every = int(str(setup.overrides["adaptive.save_every_n_steps"]))
    in_background = bool(setup.overrides.get("adaptive.save_in_background"))
    may_be_lost = every * (2 if in_background else 1)
    last = max((one.state.global_step for one in CheckpointFolder(run.out).checkpoints() if one.state), default=0)
    if done - last > may_be_lost:
        return f"after step {done} the last checkpoint is that of step {last}"
    return ""


@dataclass(frozen=True)
class SignalCase:
    """A run that is asked to end by SIGTERM.

    Attributes:
        to: "launcher" (for a single device the process that trains), "one rank", or "all" (launcher and ranks).
    """

    number: int
    setup: Setup
    to: str
    writing: str = ""

    def moment(self, reference: Reference) -> Moment:
        """A random moment, well before the last step."""
        chance = random.Random(f"signal {self.number}")
        last = reference.last_step - 2 - (reference.steps_per_save(self.writing) if self.writing else 1)
        longest_s = 0.030 if self.writing else reference.seconds_per_step
        return Moment(chance.randint(1, last), chance.uniform(0, longest_s), self.writing)


@dataclass
class SignalEnd:
    """The result of a ``SignalCase``.

    Attributes:
        status: of the launcher.
        step: the last step that the run has logged.
    """

    status: int
    step: int
    checkpoints: list[str]
    output: str
    resumed_from: str = ""
    difference: str = ""


def end_by_signal(case: SignalCase, reference: Reference, assets: Path, directory: Path) -> SignalEnd:
    """Send a run SIGTERM at its moment, resume it, and compare the resumed run with ``reference``."""
    with launched(case.setup, assets, directory) as run:
        run.wait_for_start()
        assert case.moment(reference).wait(run), run.output[-3000:]
        if case.to == "all":
            run.send_all(signal.SIGTERM)
        elif case.to == "one rank":
            run.ranks()[-1].send(signal.SIGTERM)
        else:
            run.send(signal.SIGTERM)
        status = run.wait()
    end = SignalEnd(status, run.step, run.checkpoints, run.output)
    last = finished(case.setup, assets, directory)
    end.resumed_from, end.difference = last.resumed_from, reference.difference(last)
    return end


_SHALLOW = {"model.num_layers": 2, "tokenizer.max_seq_len": 64, "lr_scheduler.num_warmup_steps": 5}
# Each rank, or the single device, has 34 samples: 17 micro-batches, of which one is left over in the first epoch.
_ACCUMULATED = {"batch_size": 2, "gradient_accumulation_steps": 2, "adaptive.memory_limit": "96MiB"}
_GROWING = {
    "batch_increase_function._component_": "torchtune_adaptive.schedule.gradient_noise_scale",
    "batch_increase_function.every_steps": 2,
    "batch_increase_function.min_measurements": 2,
    "adaptive.growth_limit": 4,
    "adaptive.lr_scaling": "sqrt",
    "adaptive.max_batch_size": 3,
}
_BUDGET = {
    "batch_size": 2,
    "adaptive.memory_limit": "96MiB",
    "adaptive.global_batch_size": 8,
    "adaptive.max_tokens_per_micro_batch": 256,
}
_BACKGROUND = {"adaptive.save_in_background": True}
_DROPOUT = {"full": {"model.attn_dropout": 0.1}, "lora": {"model.lora_dropout": 0.1}}


def _setup(name: str, kind: str, ranks: int, *parts: Mapping[str, object], samples: int = 68, **numbers: int) -> Setup:
    """A setup with dropout. ``numbers``: epochs, every (steps), keep (checkpoints)."""
    overrides: dict[str, object] = {**_SHALLOW, **_DROPOUT[kind], "dataset.split": f"train[:{samples}]"}
    for part in parts:
        overrides |= part
    overrides |= {"epochs": numbers["epochs"], "adaptive.save_every_n_steps": numbers["every"]}
    if "keep" in numbers:
        overrides["adaptive.keep_last_n_checkpoints"] = numbers["keep"]
    return Setup(name, kind, ranks, overrides)


SETUPS = [
    _setup("full, 2 ranks, growth", "full", 2, _ACCUMULATED, _GROWING, epochs=4, every=2),
    _setup("LoRA, 1 device, growth", "lora", 1, _ACCUMULATED, _GROWING, samples=34, epochs=4, every=2, keep=2),
    _setup("full, 2 ranks, token budget, background", "full", 2, _BUDGET, _BACKGROUND, epochs=3, every=3, keep=2),
    _setup("LoRA, 2 ranks, growth, background", "lora", 2, _ACCUMULATED, _GROWING, _BACKGROUND, epochs=4, every=3),
    _setup("full, 2 ranks, growth, background", "full", 2, _ACCUMULATED, _GROWING, _BACKGROUND, epochs=3, every=2),
    _setup("LoRA, 1 device, token budget, background", "lora", 1, _BUDGET, _BACKGROUND, samples=50, epochs=4, every=3),
    _setup(
        "LoRA, 2 ranks, token budget, growth",
        "lora",
        2,
        _BUDGET,
        _GROWING | {"adaptive.growth_limit": 16},
        epochs=3,
        every=2,
        keep=2,
    ),
    _setup("LoRA, 2 ranks, accumulation", "lora", 2, _ACCUMULATED, epochs=3, every=3, keep=2),
]

WITH_TENSOR_PARALLELISM = _setup(
    "full, 2 ranks, tensor parallelism",
    "full",
    2,
    _ACCUMULATED,
    {
        "tensor_parallel_dim": 2,
        "tensor_parallel_plan._component_": "torchtune.models.llama3.base_llama_tp_plan",
        "optimizer.fused": False,
        "clip_grad_norm": "null",
    },
    samples=34,
    epochs=3,
    every=2,
)


def _cases(count: int) -> Iterator[Case]:
    """Every second case is killed while it writes a checkpoint, of a step or an epoch in turn; every fourth twice."""
    for number in range(count):
        turn = number // len(SETUPS)
        of_setup = number % len(SETUPS)
        writing = ("step", "epoch")[(of_setup // 2 + turn // 2) % 2] if (of_setup + turn) % 2 == 0 else ""
        yield Case(number, SETUPS[of_setup], writing, strikes=2 if (of_setup // 2 + turn) % 4 == 0 else 1)


CASES = list(_cases(40))
ON_TWO_RANKS, ON_ONE_DEVICE, *_ = SETUPS
SIGTERM_CASES = [
    *(
        SignalCase(number, ON_ONE_DEVICE, "launcher", writing)
        for number, writing in enumerate(("", "step", "", "epoch", ""))
    ),
    *(
        SignalCase(number, ON_TWO_RANKS, to, writing)
        for number, (to, writing) in enumerate(
            (("launcher", ""), ("one rank", ""), ("launcher", "step"), ("all", ""), ("launcher", "epoch")), start=5
        )
    ),
]

"""Set a recipe up in processes of its own, have it time its micro-batches, and read what it found."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.engine.search.strategies import SearchResult
from torchtune_adaptive.engine.search.timing import Timing
from torchtune_adaptive.errors import NOTHING_FITS_ADVICE, InputError, reason_of
from torchtune_adaptive.fastest.climb import Outcome
from torchtune_adaptive.files import write_atomically, writing
from torchtune_adaptive.report.read import Search, read_run
from torchtune_adaptive.training.found_config import FOUND_NAME
from torchtune_adaptive.training.signals import end_with_parent

_FOLDER, _CONFIG, _LOG = "fastest", "config.yaml", "log.txt"
_SECONDS_TO_END = 30.0  # after a request


@dataclass
class SetUps:
    """Set-ups of one recipe, each with a config, a log and what it found in a folder of its own.

    Attributes:
        torchrun_options: of `tune run`.
        cfg: the config as it is, with interpolations.
        samples: of an optimizer step over all ranks.
        directory: where the folders are made.
    """

    torchrun_options: Sequence[str]
    recipe: str
    cfg: DictConfig
    samples: int
    directory: Path
    _count: int = field(default=0, init=False)

    def config(self, values: Mapping[str, Any]) -> DictConfig:
        """The config with these values of keys, in which micro-batches are searched by their speed."""
        cfg = self.cfg.copy()
        OmegaConf.set_struct(cfg, False)
        block = {"global_batch_size": self.samples, "objective": "speed"}
        for key, value in {**values, "use_maximum_batch_size": True}.items():
            OmegaConf.update(cfg, key, value, merge=False)
        OmegaConf.update(cfg, "adaptive", block, merge=True)
        return cfg

    def measure(self, words: str, values: Mapping[str, Any]) -> Outcome:
        """Set the recipe up with these values, and time micro-batches of different sizes."""
        folder = self.directory / _FOLDER / str(self._count)
        self._count += 1
        cfg = self.config(values)
        cfg.output_dir = str(folder)
        started = time.monotonic()
        try:
            with writing("output_dir", folder, kind="folder"):
                (folder / FOUND_NAME).unlink(missing_ok=True)
                write_atomically(folder / _CONFIG, OmegaConf.to_yaml(cfg))
                log = (folder / _LOG).open("w")
        except InputError as error:
            return Outcome(words=words, values=values, why_not=reason_of(error))
        with log:
            status = _run([*self.torchrun_options, self.recipe, "--config", str(folder / _CONFIG)], log)
        outcome = Outcome(words=words, values=values, seconds=time.monotonic() - started, folder=folder)
        if status or not (folder / FOUND_NAME).is_file():
            why_not = self._why(folder)
            return replace(outcome, why_not=why_not, is_short_of_memory=NOTHING_FITS_ADVICE in why_not)
        try:
            search = self.search_of(outcome)
        except InputError as error:
            return replace(outcome, why_not=reason_of(error))
        return with_search(outcome, search.result, search.timings)

    def search_of(self, outcome: Outcome) -> Search:
        """The search of a set-up that was measured.

        Raises:
            InputError: the set-up has not logged it, as on a disk that was full for a while.
        """
        searches = read_run(outcome.folder).searches
        if not searches:
            raise InputError(f"The log in {outcome.folder} has no search.")
        return searches[-1]

    def found_config(self, outcome: Outcome) -> DictConfig:
        """The config that trains with what the set-up has found."""
        found = OmegaConf.load(outcome.folder / FOUND_NAME)
        assert isinstance(found, DictConfig)
        written: Any = OmegaConf.to_container(self.cfg)  # with interpolations
        found.output_dir = written["output_dir"]
        return found

    def _why(self, folder: Path) -> str:
        """The sentence with which a set-up has ended, or its last line."""
        lines = (folder / _LOG).read_text(errors="replace").splitlines()
        name = self.recipe.removesuffix(".py").rpartition("/")[2]
        sentences = [
            line.partition(": ")[2] for line in lines if line.startswith((f"{name}: ", "tune-adaptive search: "))
        ]
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        return (sentences[-1] if sentences else last).rstrip(".")


def with_search(outcome: Outcome, result: SearchResult, timings: Mapping[str, Timing]) -> Outcome:
    """The outcome, with what its search has found and timed."""
    return replace(
        outcome,
        timings=timings,
        is_short_of_memory=result.exact_batch_size < result.bound,
        peak_bytes=max((probe.peak_bytes for probe in result.probes if probe.fits), default=0),
        found=result.exact_batch_size,
    )


def _run(arguments: Sequence[str], log: Any) -> int:
    """Run a search in a process of its own, which ends with this one, however that ends: its exit status."""
    command = [sys.executable, "-m", "torchtune_adaptive.cli", "search", *arguments]
    ends_too = partial(end_with_parent, os.getpid())
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=ends_too
    )
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise

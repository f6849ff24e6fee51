"""Does ``find_max_batch_size`` find the largest batch under a limit that the operating system sets on the process?

    OMP_NUM_THREADS=1 python -m benchmarks.process_limit

Here nothing counts tensors: ``RLIMIT_DATA`` makes real allocations fail. The true size is found by trying: each batch
size trains in a process of its own, without a search. Prints a table and writes it to
``results/process_limit_cpu.md``; ``--rehearse`` measures one case once and writes nothing.
"""

import argparse
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from benchmarks.peers.data import VOCAB_SIZE
from benchmarks.peers.rfc import bisect, is_out_of_memory
from benchmarks.peers.task import Model, seed_everything
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from torchtune_adaptive import find_max_batch_size
from torchtune_adaptive.memory.process_limits import held_back
from torchtune_adaptive.settings import AdaptiveSettings, parse_memory

RESULTS = Path(__file__).parent / "results" / "process_limit_cpu.md"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.process_limit"
ROUNDS = 1
STEPS_OF_A_TRIAL = 4  # the first makes the optimizer's state, the others begin with it
STEPS_AFTER_A_SEARCH = 20
MARGIN = AdaptiveSettings().margin
MOST_ROWS = 128  # where the bisection for the true size begins
BEYOND = 3  # sizes tried above the largest, to see that none of them fits again
Result = TypeVar("Result")
METERED_LIMIT = "16GiB"  # more than the processes may have, so that only the system's limit applies


class Embedded(nn.Module):
    """A large embedding and a small network."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.layers = linear_layers(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(tokens)).square().mean()


class Dense(nn.Module):
    """Linear layers on numbers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.layers = linear_layers(width, depth)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(tokens.float().unsqueeze(-1).expand(-1, -1, self.width)).square().mean()


class Llama(nn.Module):
    """The peers' model, which predicts the tokens that it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = Model(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, tokens)


def linear_layers(width: int, depth: int) -> nn.Sequential:
    """``depth`` linear layers of ``width``, each with a GELU."""
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())))


@dataclass(frozen=True)
class Case:
    """What is trained, and how many bytes its process may add to those that it has before.

    Attributes:
        steps_before: optimizer steps that are taken before the search.
    """

    name: str
    room: str
    tokens: int
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    steps_before: int = 0


CASES = [
    Case("state-heavy: an embedding of 59 MiB", "400MiB", 512, partial(Embedded, 60_000, 256)),
    Case("state-heavy: 8 layers of 16 MiB", "620MiB", 16, partial(Dense, 2048, 8)),
    Case("activation-heavy: 4 layers of 256 KiB", "400MiB", 2048, partial(Dense, 256, 4)),
    Case("activation-heavy: a Llama of 0.6 MiB", "200MiB", 128, partial(Llama, 128)),
    Case("state is there before: SGD with momentum", "300MiB", 128, partial(Dense, 1024, 12),
         partial(torch.optim.SGD, lr=1e-3, momentum=0.9), steps_before=2),
    Case("state is made in the trial: fused AdamW", "300MiB", 128, partial(Dense, 1024, 12),
         partial(torch.optim.AdamW, fused=True)),
]  # fmt: skip


@dataclass
class Found:
    """What a search found, what it took, and what its process can train with afterwards.

    Attributes:
        survives: whether ``STEPS_AFTER_A_SEARCH`` steps with ``rows`` fit.
        largest_after: the largest size, up to ``BEYOND`` rows more, with which some steps fit.
    """

    rows: int
    survives: bool
    largest_after: int
    probes: int
    ooms: int
    seconds: float


@dataclass
class Measured:
    """The results of a case by round: the true sizes with either setting of the allocator, and those found."""

    case: Case
    true_as_left: list[int] = field(default_factory=list)
    true_as_it_comes: list[int] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    with_margin: list[Found] = field(default_factory=list)


class Training:
    """A case that is trained in this process, whose memory is limited from now on."""

    def __init__(self, case: Case) -> None:
        seed_everything()
        self._case = case
        self._use(nn.Linear(2, 2))
        self.step(torch.ones(2, 2))  # what PyTorch does once per process
        limit_bytes = data_bytes() + parse_memory(case.room)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        self._use(case.make_model())
        for _ in range(case.steps_before):
            self.step(self.batch(1))

    def batch(self, rows: int) -> torch.Tensor:
        """[rows, tokens]"""
        return torch.randint(VOCAB_SIZE, (rows, self._case.tokens))

    def step(self, batch: torch.Tensor) -> None:
        """A whole train step."""
        self._model(batch).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def search(self, margin: float) -> Found:
        """What a search finds, and with which sizes steps fit after it."""
        started = time.perf_counter()
        found = find_max_batch_size(
            self.step,
            self.batch,
            model=self._model,
            optimizer=self._optimizer,
            memory_limit=METERED_LIMIT,
            margin=margin,
        )
        seconds = time.perf_counter() - started
        ooms = sum(not probe.fits for probe in found.probes)
        rows = found.batch_size
        survives = self.survives(rows, STEPS_AFTER_A_SEARCH)
        after = max([rows, *(more for more in _beyond(rows) if self.survives(more, STEPS_OF_A_TRIAL))])
        return Found(rows, survives, after, len(found.probes), ooms, seconds)

    def survives(self, rows: int, steps: int) -> bool:
        """Whether ``steps`` steps on batches of ``rows`` rows fit."""
        return not any(is_out_of_memory(lambda: self.step(self.batch(rows))) for _ in range(steps))

    def _use(self, model: nn.Module) -> None:
        self._model = model
        self._optimizer = self._case.make_optimizer(model.parameters())


def main() -> None:
    """Measure every case and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="one case once, and no file")
    if parser.parse_args().rehearse:
        print("\n".join(_document(CASES[2:3], rounds=1)))
    else:
        publish(_document(CASES, rounds=ROUNDS), RESULTS)


def _document(cases: Sequence[Case], *, rounds: int) -> list[str]:
    started, load = time.perf_counter(), os.getloadavg()[0]
    measured = [Measured(case) for case in cases]
    for _ in range(rounds):
        for one in measured:
            one.true_as_left.append(largest_that_survives(one.case, as_left=True))
            one.found.append(_search(one.case, 0.0))
            one.with_margin.append(_search(one.case, MARGIN))
            one.true_as_it_comes.append(largest_that_survives(one.case, as_left=False))
            print(one, flush=True)
    about = provenance(
        COMMAND,
        ranks=f"one process of {torch.get_num_threads()} thread at a time, {rounds} round{'s' * (rounds > 1)}",
        seconds=time.perf_counter() - started,
        load=load,
    )
    return document(measured, provenance=about)


def largest_that_survives(case: Case, *, as_left: bool) -> int:
    """The largest batch size with which some steps fit. Bisects, then tries a few more; each size has its own process.

    Args:
        as_left: whether freed tensors go back to the system at once, as a search leaves the allocator.
    """

    def trial(rows: int) -> bool:
        training = Training(case)
        with held_back(0.0, enough_bytes=parse_memory(METERED_LIMIT) if as_left else 0):
            return training.survives(rows, STEPS_OF_A_TRIAL)

    def fails(rows: int) -> bool:
        return rows > 0 and not _in_a_process(lambda: trial(rows))

    largest = bisect(fails, most=MOST_ROWS)
    return max([largest, *(rows for rows in _beyond(largest) if not fails(rows))])


def _beyond(rows: int) -> range:
    return range(rows + 1, rows + 1 + BEYOND)


def _search(case: Case, margin: float) -> Found:
    found = _in_a_process(lambda: Training(case).search(margin))
    if found is None:
        raise SystemExit(f"the search of {case.name!r} was killed")
    return found


def _in_a_process(work: Callable[[], Result]) -> Result | None:
    """What ``work`` returns in a copy of this process; None if the copy died."""
    context = multiprocessing.get_context("fork")  # what is imported here is imported there
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(work()))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


def data_bytes() -> int:
    """What ``RLIMIT_DATA`` counts of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


# ---- the document

HEADER = (
    "case",
    "limit beyond imports",
    "found",
    "largest after the search",
    f"survives {STEPS_AFTER_A_SEARCH} steps",
    "probes",
    "OOMs",
    "search, s",
    f"with a margin of {MARGIN:.0%}",
    "survives",
    "largest without a search",
    "without a search, allocator as it comes",
)


def document(measured: Sequence[Measured], *, provenance: str) -> list[str]:
    """The lines of the whole document."""
    searches = [found for one in measured for found in one.found]
    exact = sum(found.rows == found.largest_after for found in searches)
    survive = sum(found.survives for found in searches)
    usual = [found.survives for one in measured for found in one.with_margin]
    return [
        "# The largest batch under a limit of the operating system, CPU",
        "",
        provenance,
        "",
        f"Without a margin {exact} of {len(searches)} searches are exact, and training survives after"
        f" {survive} of them; with the usual margin of {MARGIN:.0%} it survives after {sum(usual)} of {len(usual)}.",
        "",
        *table(HEADER, map(_row, measured)),
        "",
        *(f"- {note}" for note in NOTES),
    ]


def _row(one: Measured) -> list[str]:
    def cell(values: Sequence[object]) -> str:
        return " / ".join(map(str, values))

    return [
        one.case.name,
        one.case.room,
        cell([found.rows for found in one.found]),
        cell([found.largest_after for found in one.found]),
        cell(["yes" if found.survives else "no" for found in one.found]),
        cell([found.probes for found in one.found]),
        cell([found.ooms for found in one.found]),
        cell([f"{found.seconds:.1f}" for found in one.found]),
        cell([found.rows for found in one.with_margin]),
        cell(["yes" if found.survives else "no" for found in one.with_margin]),
        cell(one.true_as_left),
        cell(one.true_as_it_comes),
    ]


NOTES = (
    "The limit is `RLIMIT_DATA`: what a process has after imports and a first small step, and so much more.",
    "Search: strategy and all else as they come, but a `memory_limit` of"
    f" {METERED_LIMIT}, which is never met. Its process then trains with the size found, without meter. Without a"
    " margin nothing is left for what a process grows by in later steps.",
    f"Largest after the search: with which the same process can take {STEPS_OF_A_TRIAL} steps; {BEYOND} sizes above"
    " it are tried. A search is exact if this is what it found.",
    f"Largest without a search: the same in fresh processes, sizes bisected and {BEYOND} beyond. Freed tensors go back"
    " to the system at once there, as a search arranges it. In the last column the allocator is as it comes: glibc then"
    " keeps freed blocks, of which as many are lost as their order happens to leave, and fewer rows fit.",
    "A fresh process has room for a little more: each operation that is metered for the first time, and each size for"
    " which oneDNN compiles kernels, leaves objects in memory, about 5 MiB in all.",
)


if __name__ == "__main__":
    main()

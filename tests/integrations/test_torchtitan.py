"""``AdaptiveTrainer``: torchtitan's own trainer, bit for bit, that also recovers."""

# pyright: reportMissingImports=false

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.documents import blocks
from tests.support.ranks import run_on_ranks

pytest.importorskip("torchtitan", reason="torchtitan is in tests/integrations/requirements_torchtitan.txt")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch about its own modules
    from tests.integrations.titan_runs import (  # before torchtitan's own modules
        ROWS,
        STEPS,
        TOKENS,
        AdaptiveRecordingTrainer,
        Run,
        plain_config,
        recovering,
        train,
    )

    # isort: split
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.trainer import Trainer

from torchtune_adaptive import CannotRecoverError, InputError
from torchtune_adaptive.integrations.torchtitan import (
    _DEGREES_OF_ONE,
    _LABELS,
    AdaptiveConfig,
    AdaptiveTrainer,
    _joined,
)
from torchtune_adaptive.testing import Fault, out_of_memory

pytestmark = pytest.mark.integrations

SMALL = ROWS // 2
PLACES = (0.0, 0.7)  # of a fault, as fractions of a micro-step's operations
PLAIN, CHUNKED = "plain loss", "chunked loss"
CASES = {  # by number of ranks: the loss, batches per step, replicas
    1: [(PLAIN, 1, 1), (CHUNKED, 4, 1)],
    2: [(PLAIN, 4, 1), (CHUNKED, 1, 1), (PLAIN, 1, 2), (CHUNKED, 4, 2)],
    4: [(PLAIN, 2, 2)],
}
Case = tuple[str, int, int]
Results = list[dict[Case, dict[str, Any]]]  # of each rank
with_each_case = pytest.mark.parametrize(
    ("results", "loss", "accumulate", "replicas"),
    [(world_size, *case) for world_size, cases in CASES.items() for case in cases],
    indirect=["results"],
)


class Faults:
    """A fault on the last rank, once, in a micro-step of an optimizer step."""

    def __init__(self, step: int, number: int, place: int | None) -> None:
        self.fault = Fault(place, ranks=[dist.get_world_size() - 1])
        self._where = step, number

    def around(self, trainer: Any, step: int, number: int, run: Callable[[], Any]) -> Any:
        if (step, number) != self._where:
            return run()
        with self.fault:
            return run()


def fail_in_third_chunk(trainer: Any, step: int, number: int, run: Callable[[], Any]) -> Any:
    """The last rank runs out of memory while the output layer is not resharded between chunks."""
    loss, calls = trainer.loss_fn.loss_fn, 0

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if (step, number, calls) == (0, 0, 3) and dist.get_rank() == dist.get_world_size() - 1:
            out_of_memory()
        return loss(*args, **kwargs)

    trainer.loss_fn.loss_fn = fail_once
    try:
        return run()
    finally:
        trainer.loss_fn.loss_fn = loss


def compare(world_size: int, **options: Any) -> dict[str, Any]:
    """Whether trainings are equal, by name; the same on every rank."""
    os.environ["WORLD_SIZE"] = str(world_size)
    from torchtitan.tools.logging import logger

    logger.addHandler(logged := _Warnings())

    def run(size: int | None, around: Any = None, told: int | None = None) -> Run:
        return train(recovering(plain_config(**options), size), around, told=told)

    counting = Faults(0, 0, None)
    plain, ours = train(plain_config(**options)), run(None, counting.around)
    small, small_at_first, then_small = run(SMALL), run(SMALL, told=ROWS), run(ROWS, told=SMALL)
    after_first = small_at_first if world_size > 1 else small  # elsewhere the size has fitted, so it is tried again
    found = {"no faults": ours.equals(plain), "tokens": ours.train_state["ntokens_seen"], "small": small.equals(plain)}
    found["no events"] = not (plain.events or ours.events or small.events)
    for place in PLACES:
        faults = Faults(0, 0, int(place * counting.fault.count))
        found[f"fault at {place} of the first step"] = _recovers(run(ROWS, faults.around), after_first, step=1)
    faults = Faults(1, options["accumulate"] - 1, counting.fault.count // 2)
    found["fault in the second step"] = _recovers(run(ROWS, faults.around), then_small, step=2)
    if options["chunked"]:
        found["fault in a chunk"] = _recovers(run(ROWS, fail_in_third_chunk), after_first, step=1)
    logger.removeHandler(logged)
    found["warnings"] = logged.texts
    return found


def _recovers(run: Run, told: Run, *, step: int) -> bool:
    """Whether a run has one error, in this step, and equals a told one."""
    event, *grown = run.events
    # In the first step of one process, the size has never fitted.
    has_fitted = step > 1 or dist.get_world_size() > 1
    assert [(one.step, one.before, one.after) for one in grown] == ([(step + 1, SMALL, ROWS)] if has_fitted else [])
    assert (event.step, event.before, event.after, event.unit) == (step, ROWS, SMALL, "samples"), event
    assert event.ranks == (dist.get_world_size() - 1,), event
    return run.equals(told)


class _Warnings(logging.Handler):
    """The warnings of the engine that reach torchtitan's logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("torchtune_adaptive"):
            self.texts.append(record.getMessage())


def compare_all(rank: int, world_size: int) -> dict[Case, dict[str, Any]]:
    return {
        (loss, accumulate, replicas): compare(
            world_size, chunked=loss == CHUNKED, accumulate=accumulate, replicas=replicas
        )
        for loss, accumulate, replicas in CASES[world_size]
    }


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """Computed once for a number of ranks, because torchtitan's imports take seconds."""
    return run_on_ranks(compare_all, request.param, request.param, timeout_s=3600)


@with_each_case
def test_without_faults_training_equals_torchtitans_bit_for_bit(
    results: Results, loss: str, accumulate: int, replicas: int
) -> None:
    for rank in results:
        found = rank[loss, accumulate, replicas]
        assert found["no faults"]
        assert found["no events"]
        assert not found["small"]  # or faults would show nothing: smaller micro-batches are rounded otherwise
        assert found["tokens"] == STEPS * accumulate * ROWS * TOKENS


@with_each_case
def test_after_a_fault_training_equals_one_told_the_smaller_size_and_the_first_rank_logs_it(
    results: Results, loss: str, accumulate: int, replicas: int
) -> None:
    faults = len(PLACES) + 1 + (loss == CHUNKED)
    for rank in results:
        found = rank[loss, accumulate, replicas]
        equal = {name: is_equal for name, is_equal in found.items() if name.startswith("fault")}
        assert len(equal) == faults
        assert all(equal.values()), equal
    first, *others = (rank[loss, accumulate, replicas]["warnings"] for rank in results)
    assert len(first) == faults
    assert all(text.startswith(f"micro-batch {ROWS} -> {SMALL} samples: in step ") for text in first)
    assert not any(others)


def resume(rank: int, folder: str) -> dict[str, Any]:
    """Resume trainings after two of three steps, with and without recovery, from checkpoints of both trainers."""

    def run(adaptive: bool, name: str, load_step: int, around: Any = None) -> Run:
        config = plain_config(chunked=True)
        config.checkpoint = CheckpointManager.Config(enable=True, folder=name, interval=2, load_step=load_step)
        config.dump_folder = folder
        return train(recovering(config) if adaptive else config, around)

    runs = {"plain": run(False, "plain", -1), "adaptive": run(True, "adaptive", -1)}
    keys = [FileSystemReader(f"{folder}/{name}/step-2").read_metadata().state_dict_metadata.keys() for name in runs]
    resumed = [run(adaptive, name, 2) for adaptive in (False, True) for name in runs]
    event = run(True, "plain", 2, Faults(2, 0, 100).around).events[0]
    return {
        "same keys": keys[0] == keys[1],
        "equal": [one.logged == runs["plain"].logged[2:] and one.has_tensors_of(runs["plain"]) for one in resumed],
        "event": event.step,
    }


def test_checkpoints_are_torchtitans_own(tmp_path: Path) -> None:
    (found,) = run_on_ranks(resume, 1, str(tmp_path))
    assert found == {"same keys": True, "equal": [True] * 4, "event": 3}


def train_with_another_subclass(rank: int) -> tuple[list[int], int]:
    plain = plain_config(accumulate=2)
    config = AdaptiveRecordingTrainer.Config(**{one.name: getattr(plain, one.name) for one in fields(plain)})
    config.adaptive.micro_batch_size = 3
    run = train(config)
    return config.rows, run.train_state["ntokens_seen"]


def test_another_subclass_of_trainer_can_be_made_adaptive() -> None:
    ((rows, tokens),) = run_on_ranks(train_with_another_subclass, 1)
    tried, trained = rows[: -3 * STEPS], rows[-3 * STEPS :]
    assert trained == [3, 3, 2] * STEPS
    assert set(tried) == {1, 2}
    assert tokens == STEPS * 2 * ROWS * TOKENS


def search(rank: int, chunked: bool, limits_mib: list[int]) -> list[tuple[int, bool, int]]:
    """By limit: the size found, whether training equals one told it, and its out-of-memory errors."""
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    found = []
    for limit in limits_mib:
        config = plain_config(accumulate=4, chunked=chunked)
        ours = train(recovering(config, "search", memory_limit=f"{limit + rank}MiB"))
        told = train(recovering(config, ours.micro_batch_size))
        found.append((ours.micro_batch_size, ours.equals(told), len(ours.events)))
    return found


def errors_when_told(rank: int, chunked: bool, limit_mib: int, sizes: list[int]) -> list[int]:
    """Of a run told each size; events of growth are none."""
    config, limit = plain_config(accumulate=4, chunked=chunked), str(int(0.95 * limit_mib * 2**20))
    runs = (train(recovering(config, size, memory_limit=limit)) for size in sizes)
    return [sum(bool(event.pressure) for event in run.events) for run in runs]


@pytest.mark.parametrize("chunked", [False, True])
def test_the_search_finds_the_largest_micro_batch(chunked: bool) -> None:
    (((size, is_equal, events),),) = run_on_ranks(search, 1, chunked, [58])
    assert 1 < size < 2 * ROWS
    assert (is_equal, events) == (True, 0)
    assert run_on_ranks(errors_when_told, 1, chunked, 58, [size, size + 1]) == [[0, 1]]


def test_a_search_on_two_ranks_leaves_no_trace() -> None:
    """gloo may free a buffer late, so that such a search sometimes finds less than fits: see docs/tested.md."""
    found, other = run_on_ranks(search, 2, False, [40, 60])
    assert found == other
    (some, *of_some), (all_rows, *of_all) = found
    assert 1 < some < all_rows == 4 * ROWS
    assert of_some == of_all == [True, 0]


REFUSED: list[tuple[str, str, Any, str]] = [
    *(("parallelism", name, 2, "must be 1, but is 2") for name in _DEGREES_OF_ONE),
    ("training", "disable_cuda_graphs", False, "must be set"),
    ("parallelism", "spmd_backend", "full_dtensor", "must be .*, but is full_dtensor"),
]


@pytest.mark.parametrize(("part", "name", "value", "rule"), REFUSED, ids=[name for _, name, *_ in REFUSED])
def test_what_cannot_recover_is_refused(part: str, name: str, value: Any, rule: str) -> None:
    config = recovering(plain_config())
    setattr(getattr(config, part), name, value)
    with pytest.raises(CannotRecoverError, match=rf"^For .* errors, `--{part}\.{name}` {rule}\.$"):
        AdaptiveTrainer(config)


def batch(rows: int = 2, tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"input": torch.zeros(rows, tokens), _LABELS: torch.zeros(rows, tokens), **more}


def test_batches_of_a_step_are_joined_by_rows() -> None:
    joined = _joined([batch(2, positions=torch.ones(2, 8, 3)), batch(1, positions=torch.ones(1, 8, 3))])
    assert {name: tuple(tensor.shape) for name, tensor in joined.items()} == {
        "input": (3, 8),
        _LABELS: (3, 8),
        "positions": (3, 8, 3),
    }


@pytest.mark.parametrize(
    ("batches", "name"),
    [
        ([batch(images=torch.zeros(2, 3, 4, 4))], "images"),  # as many as rows, but they may be of any row
        ([batch(mask="causal")], "mask"),
        ([batch(), batch(tokens=4)], "input"),
        ([batch(positions=torch.zeros(2, 8)), batch()], "positions"),
    ],
)
def test_batches_that_cannot_be_cut_into_rows_are_refused(batches: list[Any], name: str) -> None:
    with pytest.raises(InputError, match=rf"^`{name}` must be a tensor \[rows, tokens, \.\.\.\] in each batch"):
        _joined(batches)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--adaptive.micro_batch_size search --adaptive.memory_limit 40MiB", "The micro-batch has"),
        ("--adaptive.memory_limit 1MiB", "limit 1.0 MiB"),
    ],
)
def test_torchtitans_own_program_finds_the_trainer_and_its_flags(flags: str, expected: str, tmp_path: Path) -> None:
    program = "-m torch.distributed.run --nproc_per_node 2 -m tests.integrations.torchtitan_on_cpus"
    config = (
        f"--module tests.integrations.titan_runs --config adaptive_config --training.steps 1 --dump_folder {tmp_path}"
    )
    command = [sys.executable, *program.split(), *config.split(), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert expected in done.stdout + done.stderr, done.stderr[-4000:]


def test_the_code_of_the_document_runs() -> None:
    names: dict[str, Any] = {"dataclass": dataclass, "field": field, "TheirTrainer": Trainer}
    names |= {"AdaptiveConfig": AdaptiveConfig, "__name__": __name__}
    document = Path(__file__).parents[2] / "docs" / "loops.md"
    for block in blocks(document, "py"):
        if "integrations.transformers" not in block.text:
            exec(compile(block.text, str(document), "exec"), names)
    assert names["llama3_8b"]().adaptive.micro_batch_size == "search"
    assert issubclass(names["MyTrainer"], AdaptiveTrainer)

"""Two launchers, as on two machines, search and train together; when one ends, the other does not wait."""

import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.crash_runs import Launch, Setup, finished, last_weights, launched, step_difference
from tests.support.run_logs import events_in

SHORT = {"epochs": 1, "max_steps_per_epoch": 4, "tokenizer.max_seq_len": 128}
MIB64, MIB128 = {"adaptive.memory_limit": "64MiB"}, {"adaptive.memory_limit": "128MiB"}
# Long enough for a busy machine. Without this package's watch a node would wait for ten to thirty minutes.
QUICKLY_S = 60.0


def setup(overrides: dict[str, object], *, ranks: int = 1) -> Setup:
    return Setup("nodes", "full", ranks, SHORT | overrides, is_distributed=True)


@contextmanager
def two_nodes(
    assets: Path, directory: Path, each: Sequence[dict[str, object]], *, ranks: int = 1, **options: Any
) -> Iterator[list[Launch]]:
    """Launches on two nodes with the overrides of ``each``; the first node hosts torchrun's rendezvous."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with ExitStack() as stack:
        launches = []
        for node, overrides in enumerate(each):
            given = ["--nnodes", "2", "--nproc_per_node", str(ranks), "--rdzv_backend", "c10d", "--rdzv_id", "7"]
            given += ["--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_conf", f"is_host={node == 0}"]
            one = launched(setup(overrides), assets, directory, options=given, **options)
            launches.append(stack.enter_context(one))
        yield launches


def said(run: Launch) -> list[str]:
    """The sentences that the recipe ended with, also after a progress bar on the same line."""
    return re.findall(r"adaptive_full_finetune_distributed: (.*)", run.output)


def ends(runs: Sequence[Launch]) -> list[int]:
    return [run.wait() for run in runs]


def same_weights(one: Launch, other: Launch) -> bool:
    """Whether the weights after the first epoch are equal, bit for bit."""
    theirs, ours = last_weights(one.out, 1), last_weights(other.out, 1)
    assert theirs.keys() == ours.keys() != set()
    pairs = ((value, ours[place][name]) for place, tensors in theirs.items() for name, value in tensors.items())
    return all(torch.equal(one, other) for one, other in pairs)


REFUSED = "`adaptive.margin` must be in [0, 1), but is 2 instead."
BAD: dict[str, object] = {"adaptive.margin": 2}


@pytest.mark.exhaustive
@pytest.mark.parametrize("each", [[{}, BAD], [BAD, {}], [BAD, BAD]])
def test_a_value_that_one_node_refuses_ends_both_with_one_sentence_each(
    each: list[dict[str, object]], tiny_dir: Path, tmp_path: Path
) -> None:
    """Also where the node that hosts the rendezvous has the valid config: torchrun alone would leave it waiting."""
    with two_nodes(tiny_dir, tmp_path, each, ranks=2) as runs:
        assert ends(runs) == [1, 1]
    for own, run in zip(each, runs, strict=True):
        (sentence,) = said(run)
        assert sentence == REFUSED or sentence.endswith(f"({socket.gethostname()}) has ended the run: {REFUSED}")
        assert own is BAD or sentence != REFUSED
        assert "Traceback" in run.output.partition(sentence)[2]  # torchrun's own


@pytest.mark.exhaustive
def test_nodes_search_and_train_together_with_the_lowest_memory_limit(tiny_dir: Path, tmp_path: Path) -> None:
    search: dict[str, object] = {"use_maximum_batch_size": True}
    with two_nodes(tiny_dir, tmp_path / "two", [search | MIB128, search | MIB64], ranks=2) as runs:
        assert ends(runs) == [0, 0], runs[0].output[-3000:]
    alone = finished(setup(search | MIB64, ranks=4), tiny_dir, tmp_path / "one")
    two, one = (events_in(run.out, "search")[0] for run in (runs[0], alone))
    for name in ("batch_size", "exact_batch_size", "memory_limit_bytes", "world_size"):
        assert two[name] == one[name], name
    assert len(alone.steps) == 4
    assert step_difference(alone.steps, runs[0].steps) == ""
    assert same_weights(alone, runs[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_node_is_killed_the_other_ends_and_both_resume_later(
    killed: int, tiny_dir: Path, tmp_path: Path
) -> None:
    """They then train as one node of four ranks does that is not killed, bit for bit."""
    each: list[dict[str, object]] = [{"adaptive.save_every_n_steps": 1}] * 2
    with two_nodes(tiny_dir, tmp_path / "two", each, ranks=2, holds=[3]) as runs:
        runs[0].wait_for_step(3)
        victim, other = runs[killed], runs[1 - killed]
        for run in runs:
            assert len(run.processes) == 3
        victim.kill()
        started = time.monotonic()
        assert other.wait() == 1
        assert time.monotonic() - started < QUICKLY_S
    (sentence,) = said(other)
    assert sentence.endswith("is gone; its own output says why.")
    assert runs[0].checkpoints == ["step_1", "step_2"]
    with two_nodes(tiny_dir, tmp_path / "two", each, ranks=2) as again:
        assert ends(again) == [0, 0], again[0].output[-3000:]
    assert "step_2" in {run.resumed_from for run in again}
    alone = finished(setup(each[0], ranks=4), tiny_dir, tmp_path / "one")
    steps = [step for step in again[0].steps if step["step"] > 2]
    assert [step["step"] for step in steps] == [3, 4]
    assert step_difference(alone.steps[2:], steps) == ""
    assert same_weights(alone, again[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [0, 1])
def test_when_only_a_launcher_is_killed_all_ranks_save(killed: int, tiny_dir: Path, tmp_path: Path) -> None:
    """Also the one that hosts torchrun's rendezvous and store."""
    with two_nodes(tiny_dir, tmp_path, [{}, {}], holds=[2]) as runs:
        runs[0].wait_for_step(2)
        for run in runs:
            assert len(run.processes) == 2
        runs[killed].send(signal.SIGKILL)
        runs[0].release(2)
        assert runs[killed].wait() == -signal.SIGKILL
        assert runs[1 - killed].wait() == 1
    assert runs[0].checkpoints == ["step_3"]


@pytest.mark.exhaustive
def test_when_a_node_stands_still_the_other_says_so_and_torchrun_ends_ranks_that_wait_for_it(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """No collective fails: the connections stay open."""
    with two_nodes(tiny_dir, tmp_path, [{}, {}], ranks=2, holds=[2]) as runs:
        runs[0].wait_for_step(2)
        assert [len(run.processes) for run in runs] == [3, 3]
        runs[1].send_all(signal.SIGSTOP)
        runs[0].release(2)
        runs[0].wait_for_words("is gone; its own output says why.")
        started = time.monotonic()
        assert runs[0].wait() == 1
        assert time.monotonic() - started < QUICKLY_S
    assert len(said(runs[0])) == 1


@pytest.mark.exhaustive
def test_only_rank_0_writes_checkpoints_after_epochs(tiny_dir: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("here", "there")]
    with two_nodes(tiny_dir, tmp_path, [{"output_dir": str(folder)} for folder in folders]) as runs:
        assert ends(runs) == [0, 0], runs[0].output[-3000:]
    written = [(folder / "epoch_0").exists() for folder in folders]
    assert sorted(written) == [False, True]
    assert written == [(folder / "adaptive_log.jsonl").exists() for folder in folders]  # which rank 0 writes too

"""The examples run, search, and have the gradients of the mean over all ranks' tokens."""

import contextlib
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from examples import fsdp2_loop, titan_style
from tests.support.checkout import environment
from tests.support.faults import same_bits
from tests.support.ranks import run_on_ranks
from torchtune_adaptive import RecoverableStep
from torchtune_adaptive.engine.memory.operations import plain_parts
from torchtune_adaptive.engine.search.any_loop import SearchResult

# `transformers` takes seconds to import: only the ranks that use it import it.
EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def _gradient_norms() -> Iterator[list[float]]:
    """Collects the norms of the gradients that are clipped."""
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def clip_and_note(parameters: Any, max_norm: float) -> Any:
        norm: Any = clip(parameters, max_norm)
        norms.append(norm.full_tensor().item())
        return norm

    with mock.patch("torch.nn.utils.clip_grad_norm_", clip_and_note):
        yield norms


def _of_all_ranks(samples: Callable[[], list[Any]]) -> list[Any]:
    found = []
    for rank in range(dist.get_world_size()):
        with mock.patch.object(dist, "get_rank", return_value=rank):
            found += samples()
    return found


def _norms_by_loop(program: Any) -> tuple[float, float]:
    """The gradient's norm in the first step, and that of the mean loss over all ranks' tokens in one process."""
    model = program.make_model().eval()  # without dropout
    step = RecoverableStep(model, partial(program.micro_step, model), micro_batch_size=4)
    with _gradient_norms() as norms:
        program.train(model, torch.optim.SGD(model.parameters(), lr=0.0), step, 1)
    with mock.patch.object(program, "fully_shard"):
        whole = program.make_model().eval()
    samples = _of_all_ranks(lambda: program.make_samples(0))
    program.micro_step(whole, samples)
    num_tokens = sum(len(sample) - 1 for sample in samples)  # a text's first token is not predicted
    return norms[0], torch.nn.utils.get_total_norm([one.grad / num_tokens for one in whole.parameters()]).item()


def _norms_by_titan() -> tuple[float, float]:
    """As ``_norms_by_loop``."""
    trainer = titan_style.Trainer(titan_style.Config())
    trainer.model.eval()
    with _gradient_norms() as norms:
        trainer.train_step(trainer.batches())
    with mock.patch.object(titan_style, "fully_shard"):
        whole = titan_style.Trainer(titan_style.Config()).model.eval()
    batches = _of_all_ranks(lambda: list(itertools.islice(trainer.batches(), 2)))
    inputs, labels = (torch.cat([batch[name] for batch in batches]).flatten() for name in ("inputs", "labels"))
    torch.nn.functional.cross_entropy(whole(inputs), labels).backward()
    return norms[0], torch.nn.utils.get_total_norm(
        [one.grad for one in whole.parameters() if one.grad is not None]
    ).item()


def _searched_by_loop() -> dict[str, Any]:
    model = fsdp2_loop.make_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def parameters() -> list[torch.Tensor]:
        return [part.clone() for one in model.parameters() for part in plain_parts(one.detach())]

    before = parameters()
    size = fsdp2_loop.find_micro_batch_size(model, optimizer)
    return {"size": size, "unchanged": same_bits(before, parameters())}


def _with_torch_alone(rank: int) -> dict[str, Any]:
    return {"search": _searched_by_loop(), "norms": [_norms_by_loop(fsdp2_loop), _norms_by_titan()]}


def _with_transformers(rank: int) -> dict[str, Any]:
    from examples import transformers_loop

    norms = [_norms_by_loop(transformers_loop)]
    dist.destroy_process_group()
    return {"norms": norms} | ({"found": _found_with_padding()} if rank == 0 else {})


def _found_with_padding() -> SearchResult:
    """Found on one rank, after the process group is destroyed."""
    from examples import transformers_search

    model = transformers_search.make_model()
    return transformers_search.find(model, torch.optim.AdamW(model.parameters()), "20MiB")


@pytest.fixture(scope="module")
def torch_alone() -> list[dict[str, Any]]:
    """The trials of the examples that need only torch, by rank."""
    return run_on_ranks(_with_torch_alone, 2)


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """The other trials, by rank: once, because each process takes seconds to import ``transformers``."""
    return run_on_ranks(_with_transformers, 2)


def test_gradients_are_those_of_the_mean_over_all_ranks_tokens(torch_alone: list[dict[str, Any]]) -> None:
    _check_norms(torch_alone)


@pytest.mark.exhaustive
def test_gradients_of_transformers_are_those_of_the_mean_over_all_ranks_tokens(results: list[dict[str, Any]]) -> None:
    _check_norms(results)


def _check_norms(results: list[dict[str, Any]]) -> None:
    for norm, expected in results[0]["norms"] + results[1]["norms"]:
        assert norm == pytest.approx(expected, rel=1e-5)


def test_a_search_finds_the_same_on_every_rank_and_changes_nothing(torch_alone: list[dict[str, Any]]) -> None:
    assert [rank["search"] for rank in torch_alone] == [{"size": 4, "unchanged": True}] * 2


@pytest.mark.exhaustive
def test_a_search_with_padding_finds_the_largest_batch(results: list[dict[str, Any]]) -> None:
    found = results[0]["found"]
    two, three, *_, last = found.probes
    usable_bytes = found.memory_limit_bytes * (1 - found.margin)
    assert last.batch_size == found.batch_size
    assert last.peak_bytes <= usable_bytes < last.peak_bytes + (three.peak_bytes - two.peak_bytes)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("program", "text", "times"),
    [
        ("fsdp2_loop", "micro-batch", 5),
        ("titan_style", "tensor(", 5),
        ("transformers_loop", "micro-batch", 5),
        ("transformers_search", "batch size 48", 1),
        ("transformers_trainer", "8 samples per step, at most 6 at once", 1),
    ],
)
def test_every_program_runs_as_a_script(program: str, text: str, times: int, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{program}.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(TMPDIR=str(tmp_path)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(text) == times


def test_the_requirements_are_those_of_the_tests_or_older() -> None:
    project = (EXAMPLES.parent / "pyproject.toml").read_text()
    pins = dict(re.findall(r'"(transformers|accelerate)==([\d.]+)(?:"|.*>=)', project))
    bounds = dict(re.findall(r"^(\w+)>=([\d.]+)$", (EXAMPLES / "requirements.txt").read_text(), flags=re.MULTILINE))
    assert bounds == pins

"""The simulated GPU computes what a CPU computes, and its memory and collectives are as on a GPU."""

import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.ranks import device_of_rank, run_alone, run_on_ranks
from tests.support.recipe_runs import COMMON, adaptive_recipe, set_up, shallow_assets, tiny_config

pytestmark = pytest.mark.simulated_gpu
MIB = 2**20
Function = Callable[[torch.Tensor], torch.Tensor]


def _attention(tensor: torch.Tensor) -> torch.Tensor:
    heads = tensor.unflatten(-1, (2, 8)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads.flip(0), heads * 2, is_causal=True)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(_attention, id="attention"),
        pytest.param(lambda tensor: tensor[tensor > 0], id="shape that the data decide"),
        pytest.param(
            lambda tensor: F.cross_entropy(tensor.flatten(0, 1), torch.arange(20, device=tensor.device) % 16), id="loss"
        ),
    ],
)
def test_an_operator_and_its_gradient_are_those_of_the_cpu(function: Function) -> None:
    values = torch.randn(2, 10, 16, generator=torch.Generator().manual_seed(1))
    results = []
    for device in ("cpu", "cuda"):
        tensor = values.to(device).clone().requires_grad_()
        result = function(tensor)
        result.square().sum().backward()
        assert tensor.grad is not None
        results.append((result.detach().cpu(), tensor.grad.cpu()))
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-4, atol=1e-5)


# ---- memory


def test_above_the_limit_the_allocator_tries_again_and_runs_out_of_memory() -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 100 * MIB) / total)
    try:
        cached = torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
        del cached
        fits = torch.empty(90 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_stats()["num_alloc_retries"] == retries + 1
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
        del fits
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


PLAIN_LOOP = """
import copy

import torch
from torchtune_adaptive import find_max_batch_size

with torch.device("cuda"):
    layers = [torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)] * 8
    model = torch.nn.Sequential(*map(copy.deepcopy, layers), torch.nn.Linear(512, 8192))
optimizer = torch.optim.AdamW(model.parameters())

def train_step(batch):
    model(batch).logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def make_batch(rows):
    return torch.ones(64 * rows, 512, device="cuda")

found = find_max_batch_size(train_step, make_batch, model=model, optimizer=optimizer)
for _ in range(4):
    train_step(make_batch(found.batch_size))
"""


def test_a_plain_loop_trains_with_the_size_that_was_found() -> None:
    environment = os.environ | {"SIMULATED_GPU_GIB": "4", "SIMULATED_VALUES": "0"}
    ended = subprocess.run([sys.executable, "-c", PLAIN_LOOP], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr


def test_processes_share_a_gpu_until_they_end() -> None:
    code = (
        "import os, torch\nkept = torch.empty(300 * 2**20, dtype=torch.uint8, device='cuda')\n"
        "print(torch.cuda.mem_get_info()[0], flush=True)\ninput()"
    )
    environment = os.environ | {"SIMULATED_GPU_STATE": f"/simulated-test-{os.getpid()}", "SIMULATED_CONTEXT_MIB": "100"}
    start: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    frees = []
    with (
        subprocess.Popen([sys.executable, "-c", code], **start) as first,
        subprocess.Popen([sys.executable, "-c", f"input()\n{code}"], **start) as second,
    ):
        assert first.stdout is not None
        assert second.stdout is not None
        frees.append(int(first.stdout.readline()))
        print("now", file=second.stdin, flush=True)
        frees.append(int(second.stdout.readline()))
        first.kill()
        first.wait()
        third = subprocess.run([sys.executable, "-c", code], **start | {"stdin": None}, input="\n")
        frees.append(int(third.stdout))
        print(file=second.stdin, flush=True)
    assert (frees[0] - frees[1], frees[2]) == (400 * MIB, frees[1])


# ---- ranks


def _collectives(rank: int) -> dict[str, Any]:
    device = device_of_rank()

    def both(run: Callable[[torch.Tensor], Any]) -> list[Any]:
        tensors = [torch.arange(6.0, device=place) * (rank + 1) for place in (device, "cpu")]
        return [run(tensor) for tensor in tensors]

    def reduced(tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        dist.all_reduce(tensor, operation)
        return tensor.cpu()

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        output = tensor.new_empty(18)
        dist.all_gather_into_tensor(output, tensor)
        return output.cpu()

    def scattered(tensor: torch.Tensor) -> torch.Tensor:
        output = tensor.new_empty(2)
        dist.reduce_scatter_tensor(output, tensor)
        return output.cpu()

    def sent_around(tensor: torch.Tensor) -> torch.Tensor:
        parts = list(tensor.tensor_split(3)) if rank == 1 else None
        output = tensor.new_empty(2)
        dist.scatter(output, parts, src=1)
        dist.broadcast(output, 2)
        return output.cpu()

    found = {
        f"all_reduce {name}": both(lambda one, op=op: reduced(one, op))
        for name, op in {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.items()
    }
    found |= {"all_gather": both(gathered), "reduce_scatter": both(scattered), "scatter": both(sent_around)}
    mean = reduced(torch.full((2,), float(rank), dtype=torch.bfloat16, device=device), dist.ReduceOp.AVG)
    objects: list[Any] = [None] * 3
    dist.all_gather_object(objects, {"rank": rank})
    return found | {"mean": [mean.tolist()], "objects": [objects]}


def test_collectives_of_three_ranks_are_those_of_gloo() -> None:
    for found in run_on_ranks(_collectives, 3):
        assert found.pop("mean") == [[1.0, 1.0]]
        assert found.pop("objects") == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]]
        for name, (by_nccl, by_gloo) in found.items():
            assert torch.equal(by_nccl, by_gloo), name


# ---- waits for the device


def _places_of_waits(kind: str, tiny_dir: Path, output_dir: Path) -> set[str]:
    """The functions of this package in which the second train step of a recipe waits for the device."""
    trainer = set_up(adaptive_recipe(kind), tiny_config(kind, tiny_dir, output_dir, **COMMON)).trainer
    steps = trainer.loader.steps(0)
    trainer.train_step(next(steps))
    places: set[str] = set()

    def note(message: Any, *_: Any) -> None:
        if "called a synchronizing" in str(message):
            frames = (frame for frame in traceback.extract_stack() if "/torchtune_adaptive/" in frame.filename)
            places.add([*frames][-1].name)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        trainer.train_step(next(steps))
        torch.cuda.set_sync_debug_mode("default")
    return places


@pytest.mark.parametrize("kind", ["full_single", "lora_dpo_single"])  # torchtune's loss for distillation waits
def test_a_step_waits_for_the_device_to_copy_its_batch_and_to_read_its_figures(
    kind: str, tiny_dir: Path, tmp_path: Path
) -> None:
    assert run_alone(_places_of_waits, kind, shallow_assets(tiny_dir), tmp_path) <= {"_batch", "<lambda>", "read"}

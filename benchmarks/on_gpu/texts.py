"""What libraries say when the device has no memory left, whether that is recognised, and what works afterwards."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.on_gpu.neighbour import Neighbour
from benchmarks.on_gpu.stage import Section, Stage
from torchtune_adaptive.engine.memory.out_of_memory import (
    free_memory,
    is_out_of_memory,
    is_out_of_memory_in_collective,
)

HEADER = ["operation", "memory left", "settings", "class", "text", "taken for", "afterwards"]
_TEXT = 150  # characters
_CASE_S = 60
_MIB = 2**20
Operation = Callable[[dict[str, torch.Tensor]], Any]


def _tensor(_: Any) -> Any:
    return torch.zeros(2**30, dtype=torch.uint8, device="cuda")


def _product(given: dict[str, torch.Tensor]) -> Any:
    return torch.mm(given["matrix"], given["matrix"], out=given["out"])


def _linear(given: dict[str, torch.Tensor]) -> Any:
    return functional.linear(given["matrix"], given["matrix"], given["matrix"][0])


def _cudnn_attention(given: dict[str, torch.Tensor]) -> Any:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(given["heads"], given["heads"], given["heads"], is_causal=True)


def _attention(given: dict[str, torch.Tensor]) -> Any:
    return functional.scaled_dot_product_attention(given["heads"], given["heads"], given["heads"], is_causal=True)


def _convolution(given: dict[str, torch.Tensor]) -> Any:
    return functional.conv2d(given["image"], given["filter"])


def _factors(given: dict[str, torch.Tensor]) -> Any:
    return torch.linalg.qr(given["single"])


def _first_kernel(given: dict[str, torch.Tensor]) -> Any:
    return given["single"].erfinv_().lgamma_().digamma_()


def _compiled(given: dict[str, torch.Tensor]) -> Any:
    return torch.compile(lambda value: value.mul_(2).add_(1).sin_())(given["single"])


def _group(_: Any) -> Any:
    try:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented, but not in `__all__`
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        one = torch.ones(1, device="cuda")
        dist.all_reduce(one)
        torch.cuda.synchronize()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


EXPANDABLE, ASYNCHRONOUS = "expandable_segments:True", "backend:cudaMallocAsync"
OPERATIONS: dict[str, Operation] = {
    "a tensor": _tensor,
    "matrix product": _product,
    "linear layer": _linear,
    "attention": _attention,
    "attention of cuDNN": _cudnn_attention,
    "convolution": _convolution,
    "QR factors": _factors,
    "kernels not yet loaded": _first_kernel,
    "compiled code": _compiled,
    "NCCL's first collective": _group,
}
# Operation, bytes that are left, settings of the allocator.
CASES: list[tuple[str, int, str]] = [
    *((name, 0, "") for name in OPERATIONS),
    *(
        (name, 16 * _MIB, "")
        for name in ("matrix product", "attention of cuDNN", "convolution", "NCCL's first collective")
    ),
    ("a tensor", 512 * _MIB, EXPANDABLE),
    ("a tensor", 512 * _MIB, ASYNCHRONOUS),
    ("linear layer", 0, EXPANDABLE),
]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """Each case in a process of its own, because the first use of a library is what takes memory."""
    text = [
        "Each operation is the first of its process that needs memory of its library, after a neighbour has taken all"
        " memory but a little. *Taken for*: what this package takes the error for. *Afterwards*: the neighbour has"
        " left, the process has freed its memory, and does the same again.",
    ]
    section = Section(title="Texts of libraries without memory", header=HEADER, rows=[], text=text, data=[])
    cases = [("a tensor", 0, "")] if stage.is_rehearsal else CASES
    for name, leave_bytes, settings in cases:
        if stage.seconds_left < 10:
            text.append(f"Not measured, because no time was left: {name}, {settings or 'default'}.")
            continue
        environment = os.environ | ({"PYTORCH_CUDA_ALLOC_CONF": settings} if settings else {})
        command = [sys.executable, "-m", __name__, name, str(leave_bytes)]
        try:
            limit_s = min(_CASE_S, stage.seconds_left)
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
            last = (ran.stdout.strip().splitlines() or [""])[-1]
            found = json.loads(last) if last.startswith("{") else {"error": (ran.stdout + ran.stderr)[-2000:]}
        except subprocess.TimeoutExpired:
            found = {"error": "did not end"}
        section.data.append({"operation": name, "leave_bytes": leave_bytes, "settings": settings} | found)
        section.rows.append([name, f"{leave_bytes // _MIB} MiB", settings or "default", *_cells(found)])
        yield [section]


def _cells(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return ["", " ".join(found["error"].split())[-_TEXT:], "", "the process has ended"]
    said = " ".join(found["text"].split()).replace("|", "/")
    return [found["class"], said[:_TEXT], found["taken_for"], found["afterwards"]]


def main() -> None:
    """One case: print what was seen as JSON."""
    name, leave_bytes = sys.argv[1], int(sys.argv[2])
    operation = OPERATIONS[name]
    if not torch.cuda.is_available():
        print(json.dumps(_said(lambda: torch.zeros(2**60)) | {"afterwards": "not tried"}))
        return
    given = {
        "matrix": torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda"),
        "out": torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda"),
        "heads": torch.ones(1, 8, 1024, 64, dtype=torch.bfloat16, device="cuda"),
        "image": torch.ones(1, 3, 224, 224, device="cuda"),
        "filter": torch.ones(16, 3, 7, 7, device="cuda"),
        "single": torch.full((512, 512), 0.5, device="cuda"),
    }
    torch.cuda.synchronize()
    neighbour = Neighbour()
    neighbour.take(leave_bytes=leave_bytes)
    said = _said(lambda: _done(operation, given))
    neighbour.leave()
    afterwards = _said(lambda: (free_memory(torch.device("cuda", 0)), _done(operation, given)))
    said["afterwards"] = "works" if not afterwards["class"] else f"{afterwards['class']}: {afterwards['text'][:80]}"
    print(json.dumps(said), flush=True)
    os._exit(0)


def _done(operation: Operation, given: dict[str, torch.Tensor]) -> None:
    operation(given)
    torch.cuda.synchronize()


def _said(run: Callable[[], Any]) -> dict[str, str]:
    """The class and the text of the error that ``run`` raises, and what the package takes it for."""
    try:
        run()
    except Exception as error:
        lacks, in_collective = is_out_of_memory(error), is_out_of_memory_in_collective(error)
        taken_for = "out of memory" if lacks else "out of memory in a collective" if in_collective else "another error"
        return {"class": type(error).__name__, "text": str(error), "taken_for": taken_for}
    return {"class": "", "text": "no error", "taken_for": ""}


if __name__ == "__main__":
    main()

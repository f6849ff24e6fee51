"""Sizes found and planned with other kernels: compiled code, and flex attention on packed rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from benchmarks.live import probe_maker
from benchmarks.on_gpu.random_recipe import let_go, live_random_recipe, start_group
from benchmarks.on_gpu.sizes import SIZES, cells, config_of, plan_of, searched, traced_step, tracing_processes
from benchmarks.on_gpu.stage import Section, Stage
from tests.support.recipe_runs import loop_of
from torchtune_adaptive.engine.search.throughput import time_in_turns
from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.text import format_bytes

_SECONDS_FOR_ONE = 60.0
HEADER = [*SIZES, "tokens/s", "outside the allocator"]
_KERNELS = 4  # how many names


@dataclass(frozen=True)
class Case:
    """A config with ``keys``, as ``title``."""

    title: str
    config: str
    keys: Mapping[str, Any] = field(default_factory=dict)


def cases(stage: Stage) -> list[Case]:
    """The most important first."""
    packed = {"dataset___component_": f"{__package__}.random_rows.packed_rows", "dataset__packed": True}
    if stage.is_rehearsal:
        return [Case("packed", stage.lora, packed)]
    return [
        Case("packed: flex attention", stage.lora, packed),
        Case("compiled", stage.full, {"compile": True}),
        Case("eager", stage.lora),
        Case("compiled", stage.lora, {"compile": True}),
        Case("compiled and packed", stage.full, packed | {"compile": True}),
    ]


def measure(stage: Stage) -> Iterator[list[Section]]:
    """One case after the other, on a card that is imitated."""
    start_group(stage)
    limit_bytes = stage.limits_bytes[-1] if stage.is_rehearsal else stage.limits_bytes[-2]
    text = [
        f"As the sizes above, on {stage.limit_text(limit_bytes)}. *tokens/s*: at the size used, and at one row;"
        " *outside the allocator*: what is in use there before the model is made, and at the end."
    ]
    section = Section(title="Other kernels", header=HEADER, text=text)
    failed: list[str] = []
    pool = tracing_processes(stage)
    configs = [config_of(stage, case.config, limit_bytes, **case.keys) for case in cases(stage)]
    traced = [pool.submit(traced_step, cfg, stage.seq_len) for cfg in configs]
    for case, cfg, step in zip(cases(stage), configs, traced, strict=True):
        title = f"{case.config}, {case.title}"
        if stage.seconds_left < _SECONDS_FOR_ONE:
            text.append(f"Not measured, because no time was left: {title}.")
        else:
            try:
                found = _measured(stage, cfg)
                found |= plan_of(stage, cfg, limit_bytes, step, used=found["used"])
                section.data.append({"case": title} | found)
                outside = ", ".join(map(format_bytes, found["outside_bytes"]))
                rates = ", ".join(f"{rate:.0f}" for rate in found.get("rates", {}).values())
                section.rows.append([title, stage.limit_text(limit_bytes), *cells(found), rates, outside])
                if found.get("kernels"):
                    text.append(f"{title}: {', '.join(found['kernels'])}.")
            except Exception as error:  # keeps the other measurements
                text.append(f"Failed: {title}: {reason_of(error)}.")
                failed.append(title)
        yield [section]
    pool.shutdown(cancel_futures=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _measured(stage: Stage, cfg: DictConfig) -> dict[str, Any]:
    outside_bytes = _outside_bytes(stage)
    recipe = live_random_recipe(cfg)
    found = searched(recipe, is_timed=False)
    loop, make_batch, used = loop_of(recipe), probe_maker(recipe), found["used"]
    if not stage.is_simulated:
        sizes = sorted({1, used})
        timings = time_in_turns(
            loop,
            {rows: [make_batch(rows)] for rows in sizes},
            num_tokens={rows: rows * stage.seq_len for rows in sizes},
        )
        found["rates"] = {rows: one.rate for rows, one in timings.items()}
    if not stage.is_rehearsal:
        outside_bytes += _outside_bytes(stage)
        found["kernels"] = _kernels_of_attention(partial(loop.step, make_batch(1)))
    del loop, make_batch
    let_go(recipe)
    torch._dynamo.reset()
    return found | {"outside_bytes": outside_bytes}


def _outside_bytes(stage: Stage) -> list[int]:
    """What is in use on the device, but for what torch's allocator has reserved."""
    if stage.is_rehearsal:
        return []
    free_bytes, total_bytes = torch.cuda.mem_get_info(stage.device)
    return [total_bytes - free_bytes - torch.cuda.memory_reserved(stage.device)]


def _kernels_of_attention(run: Any) -> list[str]:
    """The names of the kernels that compute attention in ``run``."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
    except RuntimeError as error:
        return [f"not seen: {reason_of(error)}"]
    names = {event.key for event in profile.key_averages()}
    words = ("flash", "fmha", "cudnn", "sdp", "attention", "flex", "softmax")
    return sorted(name[:90].replace("|", "/") for name in names if any(word in name.lower() for word in words))[
        :_KERNELS
    ]

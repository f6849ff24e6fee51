"""Does a plan know what torch's allocator reserves, and which sizes fit?

    .venv-simulated-gpu/bin/python -m benchmarks.plan_accuracy --output benchmarks/results/plan_accuracy_simulated.md

Plans the steps of ``CASES`` and runs them on a GPU, by default a simulated one, with random weights: three steps of
each size, from an empty cache. Then tries every size near a limit, one step as a search does.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.apart import (
    CARD_GIB,
    Steps,
    arguments_of,
    batch_sizes,
    in_process,
    median_and_worst,
    planned_bytes,
    table_of_steps,
    write_and_end,
)
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table

COMMAND = "python -m benchmarks.plan_accuracy"
H200 = Path(__file__).parent / "results" / "gpu_nvidia_h200.json"
GIB = 2**30
STEPS = 3
NEAR = 3  # sizes that are tried above and below the planned one

ABOUT = """\
*reserved*: the most that torch's allocator reserved in the last of three steps, in GiB; *plan*: the error of the plan
for the same. *allocated* is the error of allocated bytes. Sizes are rows of a rank. A size fits if its step runs under
the limit and the allocator need not empty its cache, as in a search; every size near the planned one was tried.
"""


@dataclass(frozen=True)
class Case:
    """A run: a config with ``changes``, on ``ranks`` ranks.

    Attributes:
        group: the cases whose errors are summed up together.
        sizes: whose steps are measured.
        limits_gib: under which the largest size is looked for.
        expandable: torch's allocator has expandable segments.
    """

    group: str
    config: str
    _: KW_ONLY
    changes: dict[str, Any] = field(default_factory=dict)
    seq_len: int = 2048
    ranks: int = 1
    sizes: tuple[int, ...] = (1, 2, 4, 8)
    limits_gib: tuple[float, ...] = ()
    expandable: bool = False


_AC = {"enable_activation_checkpointing": True}
_PLAIN_LOSS = {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}
_LISTS = {
    "optimizer__fused": False,
    "optimizer__foreach": True,
    "clip_grad_norm": 1.0,
    "gradient_accumulation_steps": 2,
}
_ONE_BY_ONE = {"optimizer__fused": False, "optimizer__foreach": False}
_OFFLOADING = _AC | {"enable_activation_offloading": True}
_IN_BACKWARD = {"optimizer_in_bwd": True}
_SGD = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 1e-4, "momentum": 0.9}}
_ADAFACTOR = {"optimizer": {"_component_": "torch.optim.Adafactor", "lr": 1e-4}}
_1B_DPO = {
    "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
    "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 2e-5},
}
_NOT_RESHARDED = {"fsdp_reshard_after_forward": False}
_NOTHING = {"enable_activation_checkpointing": False}
_IN_FOUR, _IN_TWO = (_NOTHING | {"ac_mode": "selective", "ac_option": every} for every in (4, 2))
_1B, _3B, _8B = "llama3_2/1B_full", "llama3_2/3B_full", "llama3_1/8B_full"
_1B_LORA, _3B_LORA, _8B_LORA = "llama3_2/1B_lora", "llama3_2/3B_lora", "llama3_1/8B_lora"
_1B_QLORA, _8B_QLORA = "llama3_2/1B_qlora_single_device", "llama3_1/8B_qlora_single_device"
_1B_SINGLE, _TO_1B = "llama3_2/1B_full_single_device", "llama3_2/8B_to_1B_KD_lora_distributed"


def _candidate(config: str, changes: dict[str, Any], *sizes: int) -> Case:
    """A config with another checkpointing, under the limits of two cards."""
    return Case("fastest", config, changes=changes, sizes=sizes, limits_gib=(24, 80))


CASES = {
    "1B full": Case("full", _1B, sizes=(1, 2, 3, 5, 8, 12, 16), limits_gib=(24, 40, 60, 80)),
    "1B full, plain loss": Case("full", _1B, changes=_PLAIN_LOSS, sizes=(1, 2, 4, 8, 12), limits_gib=(40, 80)),
    "1B full, accumulation and lists": Case("full", _1B, changes=_LISTS, limits_gib=(32, 60)),
    "1B full, one by one": Case("full", _1B, changes=_ONE_BY_ONE, limits_gib=(24,)),
    "1B full, rows of 512": Case("full", _1B, seq_len=512, sizes=(1, 3, 9, 27), limits_gib=(24, 40)),
    "3B full": Case("full", _3B, sizes=(1, 2, 4, 8, 16, 26), limits_gib=(40, 60, 80)),
    "8B full": Case("full", _8B, sizes=(1, 2, 4, 8, 9, 12), limits_gib=(70, 80)),
    "1B full, checkpointing": Case("checkpointing", _1B, changes=_AC, sizes=(1, 2, 4, 8, 16, 32), limits_gib=(24, 40)),
    "1B LoRA, checkpointing": Case(
        "checkpointing", _1B_LORA, changes=_AC, sizes=(1, 2, 4, 8, 16, 32), limits_gib=(24, 40)
    ),
    "8B LoRA, checkpointing": Case("checkpointing", _8B_LORA, changes=_AC, sizes=(1, 2, 4, 8, 16), limits_gib=(24, 40)),
    # What `tune-adaptive fastest` may try.
    "1B full, one layer in 4": _candidate(_1B, _IN_FOUR, 1, 4),
    "1B full, one layer in 2": _candidate(_1B, _IN_TWO, 1, 4),
    "8B full, nothing checkpointed": _candidate(_8B, _NOTHING, 1, 2),
    "8B full, one layer in 4": _candidate(_8B, _IN_FOUR, 1, 2),
    "8B full, one layer in 2": _candidate(_8B, _IN_TWO, 1, 2),
    "8B LoRA, all layers": _candidate(_8B_LORA, _AC, 1, 2),
    "1B full, offloading": Case("offloading", _1B, changes=_OFFLOADING, sizes=(1, 2, 4, 8, 16), limits_gib=(24,)),
    "1B LoRA": Case("LoRA", _1B_LORA, sizes=(1, 2, 4, 8, 14), limits_gib=(12, 24, 40, 80)),
    "3B LoRA": Case("LoRA", _3B_LORA, sizes=(1, 2, 4, 7), limits_gib=(24, 40, 80)),
    "8B LoRA": Case("LoRA", _8B_LORA, sizes=(1, 2, 3, 4), limits_gib=(40, 80)),
    "1B LoRA, rows of 4096": Case("LoRA", _1B_LORA, seq_len=4096, sizes=(1, 2, 3, 5), limits_gib=(24, 40)),
    "1B LoRA, rows of 300": Case("LoRA", _1B_LORA, seq_len=300, sizes=(1, 5, 20, 50), limits_gib=(12, 24)),
    "1B full, optimizer in backward": Case("optimizer", _1B_SINGLE, changes=_IN_BACKWARD, limits_gib=(24,)),
    "1B full, SGD": Case("optimizer", _1B, changes=_SGD, limits_gib=(24,)),
    "1B full, Adafactor": Case("optimizer", _1B, changes=_ADAFACTOR, limits_gib=(24,)),
    "1B QLoRA": Case("QLoRA", _1B_QLORA, sizes=(1, 2, 4, 8, 16), limits_gib=(12, 24)),
    "8B QLoRA": Case("QLoRA", _8B_QLORA, limits_gib=(24, 40)),
    "8B DPO of LoRA": Case("DPO", "llama3_1/8B_lora_dpo", sizes=(1, 2, 4, 8), limits_gib=(40, 80)),
    "1B DPO": Case("DPO", "llama3_1/8B_full_dpo", changes=_1B_DPO, limits_gib=(40,)),
    "8B to 1B, distillation": Case("distillation", _TO_1B, sizes=(1, 2, 4, 8), limits_gib=(40, 80)),
    "1B full on 2 ranks": Case("ranks", _1B, ranks=2, limits_gib=(24, 40)),
    "3B full on 2 ranks": Case("ranks", _3B, ranks=2, limits_gib=(24, 40)),
    "1B LoRA on 2 ranks": Case("ranks", _1B_LORA, ranks=2, limits_gib=(24, 40)),
    "3B LoRA on 2 ranks": Case("ranks", _3B_LORA, ranks=2, sizes=(1, 2, 4), limits_gib=(24,)),
    "1B full on 2 ranks, not resharded": Case("ranks", _1B, changes=_NOT_RESHARDED, ranks=2, limits_gib=(24,)),
    "1B full on 2 ranks, checkpointing": Case(
        "ranks", _1B, changes=_AC, ranks=2, sizes=(1, 2, 4, 8, 16), limits_gib=(24,)
    ),
    "3B full on 4 ranks": Case("ranks", _3B, ranks=4, limits_gib=(24,)),
    "1B full, expandable": Case("expandable", _1B, expandable=True, limits_gib=(24, 40)),
    "8B full, expandable": Case("expandable", _8B, sizes=(2, 4, 8), expandable=True, limits_gib=(70,)),
}


# ---- in processes of their own


def _config(case: Case) -> Any:
    from omegaconf import OmegaConf

    from torchtune_adaptive.stock.configs import load_config

    cfg = load_config(case.config)
    ours = {"device": "cuda", "adaptive": {}, "gradient_accumulation_steps": 1, "tokenizer__max_seq_len": case.seq_len}
    for key, value in (ours | case.changes).items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False)
    return cfg


def _planned(case: Case) -> dict[str, Any]:
    """Allocated and reserved bytes of each size, and the largest size below each limit."""
    from torchtune_adaptive.plan.trace.tracer import Tracer

    (step,) = Tracer().step(_config(case), world_size=case.ranks, seq_lens=[case.seq_len]).lengths
    limits = {str(limit): limit for limit in case.limits_gib or (CARD_GIB,)}
    largest = {name: batch_sizes(step, gib=limit, expandable=case.expandable).largest for name, limit in limits.items()}
    sizes = batch_sizes(step, expandable=case.expandable)
    return {"sizes": planned_bytes(sizes, case.sizes), "largest": largest}


def _measured(case: Case, tried: dict[str, list[int]]) -> dict[str, Any]:
    """The same of real steps. ``tried``: by limit, the sizes of which one step is tried."""
    import torch

    from benchmarks.live import probe_maker, real_steps
    from benchmarks.on_gpu.random_recipe import live_random_recipe, random_config, start_group
    from benchmarks.on_gpu.stage import stage_for
    from tests.support.recipe_runs import loop_of
    from torchtune_adaptive.engine.distributed.snapshot import UnchangedParameters
    from torchtune_adaptive.engine.memory.out_of_memory import free_memory, is_out_of_memory

    UnchangedParameters.first_changed = lambda self: ""  # a simulated GPU has no values
    cuda = torch.cuda
    stage = replace(stage_for(Path(tempfile.mkdtemp()), seconds=3600), seq_len=case.seq_len)
    if case.ranks > 1:
        stage = replace(stage, device=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        cuda.set_device(stage.device)
    start_group(stage)
    cfg = random_config(stage, case.config, num_rows=4096, use_maximum_batch_size=False, **case.changes)
    recipe = live_random_recipe(cfg)
    loop, make_batch = loop_of(recipe, is_metered=False), probe_maker(recipe)
    found: dict[str, Any] = {"sizes": {}, "fits": {}}
    with real_steps(recipe, loop_of(recipe), limit_bytes=None):
        for rows in case.sizes:
            free_memory(stage.device)
            for _ in range(STEPS):
                cuda.reset_peak_memory_stats()
                loop.step(make_batch(rows))
            found["sizes"][str(rows)] = [cuda.max_memory_allocated(), cuda.max_memory_reserved()]
        for limit, sizes in tried.items():
            found["fits"][limit] = {}
            for rows in sizes:
                free_memory(stage.device)
                retries = cuda.memory_stats()["num_alloc_retries"]
                cuda.set_per_process_memory_fraction(float(limit) * GIB / cuda.mem_get_info()[1])
                try:
                    loop.step(make_batch(rows))
                    fits = cuda.memory_stats()["num_alloc_retries"] == retries
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    fits = False
                    error.__traceback__ = None
                cuda.set_per_process_memory_fraction(1.0)
                found["fits"][limit][str(rows)] = fits
                if not fits and case.ranks > 1:
                    break  # the collectives of an aborted step may not match
    return found


def _in_process(case: Case, name: str, what: str, folder: Path, *, content: Any = None) -> dict[str, Any]:
    """What a process of its own, or one for each rank, finds."""
    out = folder / f"{name}.{what}.json"
    out.with_suffix(".in").write_text(json.dumps(content))
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if case.expandable else {}
    ranks = case.ranks if what == "measured" else 1
    return in_process("benchmarks.plan_accuracy", ["--case", name, "--step", what], out, ranks=ranks, **environment)


def _of_h200(case: Case) -> list[dict[str, Any]]:
    """What a search on an H200 found, with what is planned for the same configs and limits."""
    from torchtune_adaptive.plan.decide import BatchSizes, Device
    from torchtune_adaptive.plan.gpu import Card
    from torchtune_adaptive.plan.trace.tracer import Tracer

    tracer, overhead = Tracer(), Card.named("H200").overhead(1)
    parts = json.loads(H200.read_text())
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for one in (
        one for part in parts if part["part"] == "sizes" for section in part["sections"] for one in section["data"]
    ):
        (step,) = tracer.step(
            _config(replace(case, config=one["config"])), world_size=1, seq_lens=[case.seq_len]
        ).lengths
        device = Device(
            name="", memory_bytes=None, allocator_limit_bytes=one["limit_bytes"], margin=0.05, overhead=overhead
        )
        sizes = BatchSizes(step, device)
        planned = {"planned": sizes.largest, "reserved": sizes.memory(one["exact"]).reserved_bytes}
        found[one["config"], one["limit_bytes"]] = planned | {
            key: one[key] for key in ("config", "limit_bytes", "exact", "exact_peak_bytes")
        }
    return list(found.values())


# ---- the document


@dataclass(frozen=True)
class Outcome:
    """What was planned and what was measured for a case.

    Attributes:
        largest: by limit, the largest size that is planned to fit.
        fits: by limit and size, whether it did.
    """

    case: Case
    steps: Steps
    largest: dict[str, int]
    fits: dict[str, dict[str, bool]]

    def limits(self) -> Iterator[tuple[str, int, int]]:
        """Each limit with the planned and the found largest size."""
        for limit, fits in self.fits.items():
            found = max((int(rows) for rows, does_fit in fits.items() if does_fit), default=0)
            yield limit, self.largest[limit], found


def outcome(name: str, case: Case, folder: Path) -> Outcome:
    """Plan and measure a case."""
    planned = _in_process(case, name, "planned", folder)
    tried = {
        limit: list(range(max(1, largest - NEAR), largest + NEAR + 1))
        for limit, largest in planned["largest"].items()
        if case.limits_gib
    }
    measured = _in_process(case, name, "measured", folder, content=tried)
    steps = Steps(name, planned["sizes"], measured["sizes"])
    return Outcome(case, steps, planned["largest"], measured["fits"])


def _report(
    outcomes: Sequence[Outcome], h200: Sequence[dict[str, Any]], output: Path, *, seconds: float, failed: Sequence[str]
) -> None:
    groups = dict.fromkeys(one.case.group for one in outcomes)
    rows = [_summary(group, [one for one in outcomes if one.case.group == group]) for group in groups]
    limits = [(one.steps.case, *limit) for one in outcomes for limit in one.limits()]
    exact = sum(planned == found for _, _, planned, found in limits)
    near = sum(abs(planned - found) == 1 for _, _, planned, found in limits)
    above = sum(planned > found for _, _, planned, found in limits)
    cells = [[name, limit, str(planned), str(found)] for name, limit, planned, found in limits]
    publish(
        output,
        "Plans against what torch's allocator reserves",
        provenance(COMMAND, seconds=seconds, device=f"a simulated GPU of {CARD_GIB} GiB"),
        ABOUT,
        *([f"Not measured, as a process failed: {', '.join(failed)}."] if failed else []),
        "## Errors",
        table(
            ["group", "steps", "allocated: median", "worst", "reserved: median", "worst"],
            [*rows, _summary("all", outcomes)],
        ),
        "## Largest sizes",
        f"Of {len(limits)} limits {exact} have the planned size, {near} differ by one row, and {above} were too high.",
        table(["case", "limit, GiB", "planned", "found"], cells),
        "## An H200",
        "What a search found there, in `gpu_nvidia_h200.json`, with the margin free.",
        table(["config", "limit, GiB", "planned", "found", "reserved", "plan"], map(_cells_of_h200, h200)),
        "## Steps",
        table_of_steps(one.steps for one in outcomes),
    )


def _cells_of_h200(one: dict[str, Any]) -> list[str]:
    figures = [str(one["planned"]), str(one["exact"]), f"{one['exact_peak_bytes'] / GIB:.2f}"]
    error = f"{one['reserved'] / one['exact_peak_bytes'] - 1:+.2%}"
    return [one["config"], f"{one['limit_bytes'] / GIB:g}", *figures, error]


def _summary(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    errors = [[error for one in outcomes for error in one.steps.errors(place).values()] for place in (0, 1)]
    return [name, str(len(errors[0])), *median_and_worst(errors[0]), *median_and_worst(errors[1])]


def main() -> None:
    arguments = arguments_of(CASES)
    if arguments.case:
        case = CASES[arguments.case]
        tried = json.loads(arguments.out.with_suffix(".in").read_text())
        steps = {"planned": _planned, "measured": lambda case: _measured(case, tried), "h200": _of_h200}
        found = steps[arguments.step](case)
        write_and_end(found, arguments.out)
    started = time.perf_counter()
    outcomes: list[Outcome] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, arguments.cases.split(";")):
            before = time.perf_counter()
            try:
                outcomes.append(outcome(name, CASES[name], Path(folder)))
            except RuntimeError as error:
                print(f"failed: {error}", file=sys.stderr)
                failed.append(name)
                continue
            last = outcomes[-1]
            told = f"{last.steps.told(1)} {list(last.limits())}"
            print(f"{name} ({time.perf_counter() - before:.0f} s): {told}", file=sys.stderr)
        h200: Any = _in_process(CASES["1B full"], "1B full", "h200", Path(folder))
    if arguments.output is not None:
        _report(outcomes, h200, arguments.output, seconds=time.perf_counter() - started, failed=failed)


if __name__ == "__main__":
    main()

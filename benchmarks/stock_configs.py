"""Which batch of each stock config fits? Planned without a GPU.

    python -m benchmarks.stock_configs

Traces a train step of every config that torchtune registers for a recipe that trains, except those in development. Each
is traced on as many ranks as its header launches. Writes tables to ``results/stock_configs.md``. Ends with status 1 if
a config was neither planned nor refused. Models with images need torchvision.
"""

import argparse
import multiprocessing
import re
import resource
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig
from torchtune._recipe_registry import get_all_recipes
from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from torchtune_adaptive.errors import InputError, TracingError
from torchtune_adaptive.plan.decide import BatchSizes, Device
from torchtune_adaptive.plan.gpu import Overhead
from torchtune_adaptive.plan.replay import exact
from torchtune_adaptive.plan.trace.step_events import TracedStep
from torchtune_adaptive.plan.trace.tracer import Tracer
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import is_lora, load_config
from torchtune_adaptive.stock.installed import stock_config_files

RESULTS = Path(__file__).parent / "results" / "stock_configs.md"
_TRAINS = re.compile("(?!dev/).*(finetune|dpo|qat|distillation)")
DEVICES_GIB = (24, 40, 80, 141)
ROW_TOKENS = 2048  # where the config's tokenizer has none
RANKS = 8  # where the config's header has none
GIB = 2**30

ABOUT = """\
Nothing here was run on a GPU. A train step of our recipe was traced over fake tensors, with the config as it is, on the
first of its ranks, which holds the most. The single-device configs are planned for our recipes on one rank. Those with
`optimizer_in_bwd` are searched and trained with, but an out-of-memory error in training ends the run. A row of
preference data is a pair of two sequences. A row of a model with images has one image, of as many tiles as the
tokenizer allows.

- *ranks*: what the config's header launches.
- *parameters*: of the model, adapters included, over all ranks.
- *tokens*: of every row: the config's `tokenizer.max_seq_len`, or {row_tokens} where it has none.
- *1 row*: the peak of a step with one row per rank: the most bytes, in GiB, that live tensors hold on the device.
- *own batch*: the config's `batch_size`, and the peak with it.
- *paged*: GiB of optimizer state that a paged optimizer can move to the host; not in the peaks.
- *{device} GiB* and so on: the largest batch per rank whose peak leaves the recipes' margin of {margin:.0%} of so much
  memory free; 0 if one row does not fit.
- *s* and *MiB*: what planning took, in seconds of one core and in resident memory, without the cache; {jobs} at a time.

These are the bytes of tensors alone. What a GPU adds (context, communicators, workspaces, what its allocator cannot
use) is not included, so that the largest batch on a real one may be smaller.
"""


@dataclass(frozen=True)
class StockConfig:
    """A config that the stock ``recipe`` is registered with, its ranks, and the tokens of its rows."""

    recipe: str
    name: str
    cfg: DictConfig
    ranks: int
    row_tokens: int

    @property
    def method(self) -> str:
        """How the model is trained: "full", "LoRA", "DoRA", "QLoRA" or "QDoRA"."""
        model = self.cfg.model
        if not is_lora(self.cfg):
            return "full"
        quantized = model.get("quantize_base", False) or str(model._component_).rpartition(".")[2].startswith("qlora")
        return ("Q" if quantized else "") + ("DoRA" if model.get("use_dora", False) else "LoRA")


@dataclass(frozen=True)
class Planned:
    """The result of planning a config: a traced step, or why it was refused, or how planning failed.

    Attributes:
        seconds, resident_mib: of the process that traced it: its time on a core, and the most memory that it had.
    """

    config: StockConfig
    step: TracedStep | None = None
    refused: str = ""
    failed: str = ""
    seconds: float = 0.0
    resident_mib: float = 0.0


def main() -> None:
    """Plan all configs and write the table."""
    parser = argparse.ArgumentParser(description="Plan all stock configs without a GPU.")
    parser.add_argument("--jobs", type=int, default=2, help="configs planned at a time (default: %(default)s)")
    jobs = parser.parse_args().jobs
    configs = stock_configs()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        planned = list(tqdm(pool.imap(plan, configs), total=len(configs), unit=" configs"))
    _report(planned, jobs=jobs)
    raise SystemExit(any(one.failed for one in planned))


def stock_configs() -> list[StockConfig]:
    """All configs of the recipes that train."""
    configs: list[StockConfig] = []
    for recipe in get_all_recipes():
        if _TRAINS.match(recipe.name):
            for stock in recipe.configs:
                cfg = load_config(stock.name)
                header = stock_config_files()[stock.name].read_text().split("\n\n")[0]
                ranks = 1 if recipe.name.endswith("single_device") else ranks_launched(header)
                row_tokens = cfg.tokenizer.get("max_seq_len") or ROW_TOKENS
                configs.append(StockConfig(recipe.name, stock.name, cfg, ranks, row_tokens))
    return configs


def ranks_launched(header: str) -> int:
    """The ranks of the launch in a config's header.

    >>> ranks_launched("tune run --nnodes 1 --nproc_per_node 4 x"), ranks_launched("on 2 nodes w/ 8 devices")
    (4, 16)
    """
    cluster = re.search(r"(\d+) nodes w/ (\d+) devices", header)
    if cluster is not None:
        return int(cluster[1]) * int(cluster[2])
    nodes, per_node = (re.search(rf"--{option} (\d+)", header) for option in ("nnodes", "nproc_per_node"))
    return (int(nodes[1]) if nodes else 1) * int(per_node[1]) if per_node else RANKS


def plan(config: StockConfig) -> Planned:
    """Trace the config's step."""
    try:
        step = Tracer().step(config.cfg, world_size=config.ranks, seq_lens=[config.row_tokens])
    except TracingError as error:
        return Planned(config, failed=str(error))
    except InputError as error:
        return Planned(config, refused=str(error))
    took = resource.getrusage(resource.RUSAGE_SELF)
    return Planned(config, step, seconds=took.ru_utime + took.ru_stime, resident_mib=took.ru_maxrss / 2**10)


def _report(planned: Sequence[Planned], *, jobs: int) -> None:
    margin = AdaptiveSettings().margin
    parts: list[str | list[str]] = []
    for recipe in dict.fromkeys(one.config.recipe for one in planned if one.step):
        header = ["config", "method", "ranks", "parameters", "tokens", "1 row", "own batch", "paged"]
        header += [*(f"{device} GiB" for device in DEVICES_GIB), "s", "MiB"]
        rows = [_cells(one, one.step, margin) for one in planned if one.config.recipe == recipe and one.step]
        parts += [f"## {recipe}", table(header, rows)]
    for title, reasons in (
        ("Refused", {one.config.name: one.refused for one in planned if one.refused}),
        ("Failed", {one.config.name: one.failed for one in planned if one.failed}),
    ):
        if reasons:
            parts += [f"## {title}", [f"- {name}: {reason}" for name, reason in reasons.items()]]
    publish(
        RESULTS,
        "The stock configs' batch sizes, planned without a GPU",
        provenance("python -m benchmarks.stock_configs"),
        _counted(planned),
        ABOUT.format(row_tokens=ROW_TOKENS, device=DEVICES_GIB[0], margin=margin, jobs=jobs),
        *parts,
    )


def _counted(planned: Sequence[Planned]) -> str:
    counts = Counter("planned" if one.step else "refused" if one.refused else "failed" for one in planned)
    told = f"{counts['planned']} planned, {counts['refused']} refused, {counts['failed']} failed"
    seconds = [one.seconds for one in planned if one.step]
    most_mib = max(one.resident_mib for one in planned)
    return (
        f"{len(planned)} configs: {told}. A plan took {statistics.median(seconds):.1f} s in the median, at most"
        f" {max(seconds):.1f} s and {most_mib:.0f} MiB."
    )


def _device(memory_bytes: int, margin: float) -> Device:
    return Device(name="any", memory_bytes=memory_bytes, margin=margin, overhead=Overhead())


def _cells(planned: Planned, step: TracedStep, margin: float) -> list[str]:
    config, (events,) = planned.config, step.lengths
    own_batch_size = config.cfg.batch_size
    largest = [BatchSizes(events, _device(size * GIB, margin)).largest for size in DEVICES_GIB]
    return [
        config.name,
        config.method,
        str(config.ranks),
        f"{step.num_parameters / 1e9:.2f}e9",
        str(config.row_tokens),
        f"{exact(events.at(1)).allocated_bytes / GIB:.2f}",
        f"{own_batch_size}: {exact(events.at(own_batch_size)).allocated_bytes / GIB:.2f}",
        f"{step.paged_bytes / GIB:.2f}" if step.paged_bytes else "",
        *("any" if batch_size is None else str(batch_size) for batch_size in largest),
        f"{planned.seconds:.1f}",
        f"{planned.resident_mib:.0f}",
    ]


if __name__ == "__main__":
    main()

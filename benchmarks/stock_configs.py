"""Which batch of each stock config fits? Planned without a GPU.

    python -m benchmarks.stock_configs

Traces a train step of every config that torchtune registers for its four recipes of full and LoRA finetuning, on as
many ranks as the config's header launches, and writes tables to ``docs/stock_configs.md``. Ends with status 1 if a
config was neither planned nor refused.
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig
from torchtune._recipe_registry import get_all_recipes
from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.tables import table
from torchtune_adaptive.errors import InputError, TracingError
from torchtune_adaptive.plan.client import trace
from torchtune_adaptive.plan.step_peaks import TracedStep
from torchtune_adaptive.search.strategies import usable_bytes
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import is_lora, load_config
from torchtune_adaptive.stock.load import stock_config_dir

DOCUMENT = Path(__file__).parent.parent / "docs" / "stock_configs.md"
RECIPES = tuple(
    f"{method}_finetune_{where}" for method in ("full", "lora") for where in ("distributed", "single_device")
)
DEVICES_GIB = (24, 40, 80, 141)
ROW_TOKENS = 2048  # where the config's tokenizer has none
RANKS = 8  # where the config's header has none
GIB = 2**30

ABOUT = """\
Nothing here was run on a GPU. A train step of our recipe was traced over fake tensors, with the config as it is, on the
first of its ranks, which holds the most. The single-device configs are planned for our recipes on one rank. Those with
`optimizer_in_bwd` are searched and trained with, but an out-of-memory error in training ends the run.

- *ranks*: what the config's header launches.
- *parameters*: of the model, adapters included, over all ranks.
- *tokens*: of every row: the config's `tokenizer.max_seq_len`, or {row_tokens} where it has none.
- *1 row*: the peak of a step with one row per rank: the most bytes, in GiB, that live tensors hold on the device.
- *own batch*: the config's `batch_size`, and the peak with it.
- *paged*: GiB of optimizer state that a paged optimizer can move to the host; not in the peaks.
- *{device} GiB* and so on: the largest batch per rank whose peak leaves the recipes' margin of {margin:.0%} of so much
  memory free; 0 if one row does not fit.

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
        """What of the model is trained."""
        model = self.cfg.model
        if not is_lora(self.cfg):
            return "full"
        quantized = model.get("quantize_base", False) or str(model._component_).rpartition(".")[2].startswith("qlora")
        return ("Q" if quantized else "") + ("DoRA" if model.get("use_dora", False) else "LoRA")


@dataclass(frozen=True)
class Planned:
    """What came of planning a config: a traced step; else why it was refused; else how that failed."""

    config: StockConfig
    step: TracedStep | None = None
    refused: str = ""
    failed: str = ""


def main() -> None:
    """Plan all configs and write the table."""
    parser = argparse.ArgumentParser(description="Plan all stock configs without a GPU.")
    parser.add_argument("--jobs", type=int, default=2, help="configs planned at a time (default: %(default)s)")
    jobs = parser.parse_args().jobs
    configs = stock_configs()
    with ThreadPoolExecutor(jobs) as pool:
        planned = list(tqdm(pool.map(plan, configs), total=len(configs), unit=" configs"))
    DOCUMENT.write_text(document(planned))
    print(f"{_counted(planned)}\nWritten to {DOCUMENT}")
    raise SystemExit(any(one.failed for one in planned))


def stock_configs() -> list[StockConfig]:
    """All configs of the four recipes."""
    configs: list[StockConfig] = []
    for recipe in get_all_recipes():
        if recipe.name in RECIPES:
            for stock in recipe.configs:
                cfg = load_config(stock.name)
                header = (stock_config_dir() / stock.file_path).read_text().split("\n\n")[0]
                ranks = ranks_launched(header) if recipe.name.endswith("distributed") else 1
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
        step = trace(config.cfg, world_size=config.ranks, seq_lens=[config.row_tokens])
    except TracingError as error:
        return Planned(config, failed=str(error))
    except InputError as error:
        return Planned(config, refused=str(error))
    return Planned(config, step)


def document(planned: Sequence[Planned]) -> str:
    """The text of ``docs/stock_configs.md``."""
    margin = AdaptiveSettings().margin
    lines = [
        "# The stock configs' batch sizes, planned without a GPU",
        "",
        provenance("python -m benchmarks.stock_configs"),
        "",
        _counted(planned),
        "",
        ABOUT.format(row_tokens=ROW_TOKENS, device=DEVICES_GIB[0], margin=margin).rstrip(),
    ]
    for recipe in RECIPES:
        header = ["config", "method", "ranks", "parameters", "tokens", "1 row", "own batch", "paged"]
        header += [f"{device} GiB" for device in DEVICES_GIB]
        rows = [_cells(one.config, one.step, margin) for one in planned if one.config.recipe == recipe and one.step]
        lines += ["", f"## {recipe}", "", *table(header, rows)]
    for title, reasons in (
        ("Refused", {one.config.name: one.refused for one in planned if one.refused}),
        ("Failed", {one.config.name: one.failed for one in planned if one.failed}),
    ):
        if reasons:
            lines += ["", f"## {title}", "", *(f"- {name}: {reason}" for name, reason in reasons.items())]
    return "\n".join(lines) + "\n"


def _counted(planned: Sequence[Planned]) -> str:
    counts = Counter("planned" if one.step else "refused" if one.refused else "failed" for one in planned)
    return (
        f"{len(planned)} configs: {counts['planned']} planned, {counts['refused']} refused, {counts['failed']} failed."
    )


def _cells(config: StockConfig, step: TracedStep, margin: float) -> list[str]:
    (peaks,) = step.peaks
    own_batch_size = config.cfg.batch_size
    largest = [peaks.largest_batch_size(usable_bytes(device * GIB, margin)) for device in DEVICES_GIB]
    return [
        config.name,
        config.method,
        str(config.ranks),
        f"{step.num_parameters / 1e9:.2f}e9",
        str(config.row_tokens),
        f"{peaks.peak_bytes(1) / GIB:.2f}",
        f"{own_batch_size}: {peaks.peak_bytes(own_batch_size) / GIB:.2f}",
        f"{step.paged_bytes / GIB:.2f}" if step.paged_bytes else "",
        *("any" if batch_size is None else str(batch_size) for batch_size in largest),
    ]


if __name__ == "__main__":
    main()

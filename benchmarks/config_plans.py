"""Which batch size of each ready config fits? Planned without a GPU.

    python -m benchmarks.config_plans [NAME ...]

Plans the configs that ``scripts/config_table.py`` lists, or only the named ones, on the ranks of their launch,
for GPUs of several sizes, and writes ``benchmarks/results/config_plans.json``. ``scripts/make_configs.py`` puts the
figures into the configs. Ends with status 1 if a config cannot be planned.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm

from benchmarks.provenance import provenance
from scripts.config_table import Config, all_configs
from scripts.make_configs import DEVICES_GIB, GIB, PLANS, digest
from torchtune_adaptive.errors import InputError, TracingError
from torchtune_adaptive.plan.client import trace
from torchtune_adaptive.plan.plan import Card, Trace, as_traced, plan
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import load_config, resolved


def main() -> None:
    """Plan the configs and write the file."""
    parser = argparse.ArgumentParser(description="Plan the ready configs without a GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="configs to plan (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="configs planned at a time (default: %(default)s)")
    arguments = parser.parse_args()
    known = {config.full_name: config for config in all_configs()}
    if unknown := sorted(set(arguments.names) - known.keys()):
        sys.exit(f"`NAME` must be a ready config, but is {unknown[0]!r} instead.")
    chosen = [known[name] for name in arguments.names] or list(known.values())
    before = json.loads(PLANS.read_text())["configs"] if arguments.names and PLANS.exists() else {}
    found, failed = _plan_all(chosen, jobs=arguments.jobs)
    kept = {name: one for name, one in (before | found).items() if name in known}
    PLANS.write_text(json.dumps({"configs": kept}, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} configs planned, {len(failed)} failed. Written to {PLANS}")
    sys.exit("\n".join(failed) or 0)


def planned(config: Config, *, traced_by: Trace = trace) -> dict[str, Any]:
    """The batch sizes of ``config`` that fit on GPUs of each size, ready for JSON; its step is traced once.

    Raises:
        InputError, TracingError: it cannot be planned.
    """
    cfg = load_config(config.full_name)
    settings = AdaptiveSettings.from_cfg(cfg)
    cfg = DictConfig(resolved(cfg))
    step = traced_by(as_traced(settings, cfg), world_size=config.ranks, seq_lens=[config.row_tokens])
    gpus: dict[str, Any] = {}
    for size_gib in DEVICES_GIB:
        (length,) = plan(
            cfg,
            world_size=config.ranks,
            card=Card(memory_bytes=size_gib * GIB),
            seq_lens=[config.row_tokens],
            traced_by=lambda *_, **__: step,
        ).lengths
        gpus[f"{size_gib}GiB"] = {
            "largest_batch_size": length.exact_batch_size,
            "certain_batch_size": length.certain_batch_size,
            "batch_size": length.batch_size,
            "traced_bytes": round(length.peak_bytes),
            "process_bytes": round(length.process_bytes),
        }
    return {
        "digest": digest(config),
        "ranks": config.ranks,
        "row_tokens": config.row_tokens,
        "num_parameters": step.num_parameters,
        "gpus": gpus,
    }


def _plan_all(configs: Sequence[Config], *, jobs: int) -> tuple[dict[str, Any], list[str]]:
    """The plans by the configs' names, and a line for each that failed."""
    made = provenance("python -m benchmarks.config_plans")

    def attempt(config: Config) -> dict[str, Any] | str:
        try:
            return planned(config) | {"made": made}
        except (InputError, TracingError) as error:
            return f"{config.full_name}: {error}"

    with ThreadPoolExecutor(jobs) as pool:  # each trace is a process of its own
        results = list(tqdm(pool.map(attempt, configs), total=len(configs), unit=" configs"))
    found = {config.full_name: one for config, one in zip(configs, results, strict=True) if not isinstance(one, str)}
    return found, [one for one in results if isinstance(one, str)]


if __name__ == "__main__":
    main()

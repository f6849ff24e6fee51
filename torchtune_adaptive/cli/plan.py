"""``tune-adaptive plan``: what fits of a config, found without a GPU, weights or data."""

import argparse
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.cache import user_cache_folder
from torchtune_adaptive.cli.arguments import Commands, integer, integers
from torchtune_adaptive.errors import InputError, require_integer
from torchtune_adaptive.plan.client import trace
from torchtune_adaptive.plan.gpus import is_amd, memory_of
from torchtune_adaptive.plan.plan import USUAL_SEQ_LENS, Card, Plan, Trace, plan
from torchtune_adaptive.plan.report import grid_text, plan_json, plan_text, suggestion_text, what_if_text
from torchtune_adaptive.plan.step_outputs import StepOutputs, trace_planned_step
from torchtune_adaptive.plan.suggestions import Suggestion, suggestions
from torchtune_adaptive.plan.trace_cache import TraceCache
from torchtune_adaptive.plan.what_if import what_if
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import load_config, method_of, resolved
from torchtune_adaptive.text import format_bytes


def add_plan(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser("plan", help="what fits of a config, found without a GPU, weights or data")
    command.add_argument("--config", required=True, help="name of a stock config or of ours, or a path")
    command.add_argument(
        "--nproc_per_node", "--nproc-per-node", default="1", help="ranks on a machine, or several numbers [1]"
    )
    command.add_argument("--nnodes", default="1", help="machines [1]")
    command.add_argument(
        "--memory", help="each rank's GPU: its name (H100) or a size (80GiB), or several [adaptive.memory_limit]"
    )
    command.add_argument("--seq-len", help="tokens of a row, or several lengths with commas between [the config's]")
    command.add_argument("--batch-size", help="rows per rank, or several numbers: what each takes, and whether it fits")
    command.add_argument(
        "--what-if", action="store_true", help="what checkpointing, offloading, LoRA and others would save"
    )
    command.add_argument("--modules", action="store_true", help="the modules that hold most at a step's peak")
    command.add_argument("--snapshot", type=Path, help="write a step's allocations to FILE.pickle, for torch's viewer")
    command.add_argument("--plot", type=Path, help="write a picture of a step's memory to FILE.svg or FILE.html")
    command.add_argument("--calibration", type=Path, help="file that `tune-adaptive calibrate` wrote on such a GPU")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="as for `tune run`")
    command.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    cfg = load_config(arguments.config, arguments.overrides)
    settings = AdaptiveSettings.from_cfg(cfg)
    cfg = DictConfig(resolved(cfg))
    method_of(cfg)  # refused before anything is traced
    nodes = integer("nnodes", arguments.nnodes)
    ranks = integers("nproc_per_node", arguments.nproc_per_node)  # of each machine
    memories = _memories(arguments.memory, settings)
    of_one = {
        "--what-if": arguments.what_if,
        "--modules": arguments.modules,
        "--snapshot": arguments.snapshot,
        "--plot": arguments.plot,
    }
    for option in (option for option, given in of_one.items() if given and len(ranks) * len(memories) > 1):
        raise InputError(f"`{option}` must be left out of a table over GPUs and ranks, but is given.")
    outputs = StepOutputs(arguments.modules, arguments.snapshot, arguments.plot)
    if arguments.what_if:
        require_integer("batch_size", cfg.get("batch_size"), minimum=1)
    seq_lens = _seq_lens(arguments.seq_len, settings, cfg)
    batch_sizes = [] if arguments.batch_size is None else integers("batch_size", arguments.batch_size)
    traced_by = TraceCache(trace, user_cache_folder("plans"))
    plans = {
        name: [
            plan(
                cfg,
                world_size=per_node * nodes,
                ranks_of_machine=per_node,
                card=Card(memory_bytes=memory_bytes, calibration=arguments.calibration, is_amd=is_amd(name)),
                seq_lens=seq_lens,
                batch_sizes=batch_sizes,
                traced_by=traced_by,
            )
            for per_node in ranks
        ]
        for name, memory_bytes in memories.items()
    }
    if len(ranks) * len(memories) == 1:
        ((planned,),) = plans.values()
        _print_one(planned, cfg, arguments, outputs=outputs, traced_by=traced_by)
    elif arguments.json:
        found = [{"memory": name} | plan_json(one, []) for name, row in plans.items() for one in row]
        print(json.dumps(found, indent=2))
    else:
        print(grid_text(plans, title=arguments.config))


def _print_one(
    planned: Plan, cfg: DictConfig, arguments: argparse.Namespace, *, outputs: StepOutputs, traced_by: Trace
) -> None:
    prints = not arguments.json
    if prints:
        print(plan_text(planned, title=arguments.config))
    helpful = [] if planned.fits else _suggest(planned, cfg, prints=prints, traced_by=traced_by)
    effects = _what_if(planned, cfg, traced_by=traced_by) if arguments.what_if else []
    if prints and effects:
        print(f"\n{what_if_text(effects)}")
    events = trace_planned_step(planned, cfg) if outputs.any else None
    if events is not None:
        for text in outputs.texts(events, planned, title=arguments.config):
            if prints:
                print(f"\n{text}")
    if not prints:
        print(json.dumps(plan_json(planned, helpful, effects, events), indent=2))


def _what_if(planned: Plan, cfg: DictConfig, *, traced_by: Trace) -> list[Suggestion]:
    """The effects for the first of the lengths, with the config's own batch."""
    options: dict[str, Any] = {"world_size": planned.world_size, "card": planned.card, "traced_by": traced_by}
    return list(what_if(cfg, seq_len=planned.lengths[0].seq_len, batch_size=cfg.batch_size, **options))


def _suggest(planned: Plan, cfg: DictConfig, *, prints: bool, traced_by: Trace) -> list[Suggestion]:
    """Plan suggestions for the shortest rows of ``planned``; print each as soon as it is planned if ``prints``."""
    found: list[Suggestion] = []
    shortest = min(length.seq_len for length in planned.lengths)
    if prints:
        print(f"\nNothing fits. With rows of {shortest} tokens:")
    for suggestion in suggestions(
        cfg, world_size=planned.world_size, card=planned.card, seq_len=shortest, traced_by=traced_by
    ):
        found.append(suggestion)
        if prints:
            print(f"- {suggestion_text(suggestion)}", flush=True)
    return found


def _memories(text: str | None, settings: AdaptiveSettings) -> dict[str, int]:
    """The bytes of each GPU, by its name as it was given."""
    if text is not None:
        return {name: memory_of(name) for name in text.split(",")}
    if settings.memory_limit_bytes is None:
        raise InputError("`--memory` must be a GPU's name or a size, as in H100 or 80GiB, but is missing.")
    return {format_bytes(settings.memory_limit_bytes): settings.memory_limit_bytes}


def _seq_lens(text: str | None, settings: AdaptiveSettings, cfg: DictConfig) -> list[int]:
    """Row lengths to plan: those asked for, else the config's own, else the usual ones."""
    if text is not None:
        return integers("seq_len", text)
    if settings.seq_len is not None:
        return [settings.seq_len]
    tokenizer_len, model_len = (_max_seq_len(cfg, block) for block in ("tokenizer", "model"))
    if tokenizer_len is not None:
        return [tokenizer_len]
    if model_len is None:
        return list(USUAL_SEQ_LENS)
    return [length for length in USUAL_SEQ_LENS if length <= model_len] or [model_len]


def _max_seq_len(cfg: DictConfig, block: str) -> int | None:
    """``max_seq_len`` of the config's ``block``, or None if it has none.

    Raises:
        InputError: it is not a positive integer.
    """
    values = cfg.get(block)
    length = values.get("max_seq_len") if isinstance(values, DictConfig) else None
    return None if length is None else require_integer(f"{block}.max_seq_len", length, minimum=1)

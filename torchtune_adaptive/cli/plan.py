"""``tune-adaptive plan``: predict which batch sizes of a config fit, without a GPU, weights or data."""

import argparse
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.cli.arguments import Commands, add_command, integer, integers
from torchtune_adaptive.errors import InputError, require_integer
from torchtune_adaptive.plan.cache import user_cache_folder
from torchtune_adaptive.plan.decide import USUAL_SEQ_LENS, Card, Plan, Trace, plan
from torchtune_adaptive.plan.gpus import is_amd, memory_of
from torchtune_adaptive.plan.show.outputs import StepOutputs, trace_planned_step
from torchtune_adaptive.plan.show.text import grid_text, plan_json, plan_text, suggestion_text, what_if_text
from torchtune_adaptive.plan.suggestions import Suggestion, suggestions
from torchtune_adaptive.plan.trace.client import trace
from torchtune_adaptive.plan.trace_cache import TraceCache
from torchtune_adaptive.plan.what_if import what_if
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.checks import check_top_level_keys
from torchtune_adaptive.stock.configs import load_config, method_of, resolved
from torchtune_adaptive.text import format_bytes


def add_plan(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "plan",
        "predict which batch sizes of a config fit, without a GPU",
        "plan --config llama3_1/8B_full --nproc_per_node 8 --memory H100 --seq-len 4096,8192",
        "plan --config llama3_1/8B_lora --memory A100-80GB --batch-size 1,2,4,8",
        "plan --config llama3_1/8B_full --memory H100 --batch-size 4 --modules --plot step.svg",
        "plan --config llama3_1/8B_full --memory 24GiB,A100-80GB,H100 --nproc_per_node 1,2,4,8",
    )
    command.add_argument("--config", required=True, help="name or path of a config")
    command.add_argument(
        "--nproc_per_node",
        "--nproc-per-node",
        default="1",
        help="GPUs per machine; several numbers, separated by commas, give a table [1]",
    )
    command.add_argument("--nnodes", default="1", help="number of machines [1]")
    command.add_argument(
        "--memory", help="memory of each GPU: a name (H100) or a size (80GiB), or several [adaptive.memory_limit]"
    )
    command.add_argument("--seq-len", help="tokens per row, or several lengths, separated by commas [the config's]")
    command.add_argument(
        "--batch-size", help="also plan this batch size per rank, or several: memory, and whether it fits"
    )
    command.add_argument(
        "--what-if", action="store_true", help="show how much memory each change of the config would save"
    )
    command.add_argument(
        "--modules", action="store_true", help="list the modules that hold the most memory at the step's peak"
    )
    command.add_argument(
        "--snapshot", type=Path, help="write a step's allocations to this .pickle file, for pytorch.org/memory_viz"
    )
    command.add_argument("--plot", type=Path, help="write a plot of a step's memory to this .svg or .html file")
    command.add_argument(
        "--calibration", type=Path, help="file that `tune-adaptive calibrate` wrote on the same GPU model"
    )
    command.add_argument("--json", action="store_true", help="print the plan as JSON")
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override a key of the config, as with `run`"
    )
    command.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    cfg = load_config(arguments.config, arguments.overrides)
    check_top_level_keys(cfg)
    settings = AdaptiveSettings.from_cfg(cfg)
    cfg = DictConfig(resolved(cfg))
    method_of(cfg)  # refuse an unknown recipe before tracing
    nodes = integer("--nnodes", arguments.nnodes)
    ranks = integers("--nproc_per_node", arguments.nproc_per_node)  # of each machine
    memories = _memories(arguments.memory, settings)
    is_one = len(ranks) * len(memories) == 1
    for option in ("what_if", "modules", "snapshot", "plot"):
        if getattr(arguments, option) and not is_one:
            option = f"--{option.replace('_', '-')}"
            raise InputError(f"`{option}` must be left out with several GPUs or numbers of ranks, but is given.")
    outputs = StepOutputs(arguments.modules, arguments.snapshot, arguments.plot)
    if arguments.what_if:
        require_integer("batch_size", cfg.get("batch_size"), minimum=1)
    seq_lens = _seq_lens(arguments.seq_len, settings, cfg)
    batch_sizes = [] if arguments.batch_size is None else integers("--batch-size", arguments.batch_size)
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
    if is_one:
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
    effects: list[Suggestion] = []
    if arguments.what_if:  # for the first row length and the config's own batch size
        options: dict[str, Any] = {"seq_len": planned.lengths[0].seq_len, "batch_size": cfg.batch_size}
        options |= {"world_size": planned.world_size, "card": planned.card, "traced_by": traced_by}
        effects = list(what_if(cfg, **options))
        if prints:
            print(f"\n{what_if_text(effects)}")
    events = trace_planned_step(planned, cfg) if outputs.any else None
    if events is not None:
        for text in outputs.texts(events, planned, title=arguments.config):
            if prints:
                print(f"\n{text}")
    if not prints:
        print(json.dumps(plan_json(planned, helpful, effects, events), indent=2))


def _suggest(planned: Plan, cfg: DictConfig, *, prints: bool, traced_by: Trace) -> list[Suggestion]:
    """Plan suggestions for the shortest rows of ``planned``. If ``prints``, print each one once it is planned."""
    found: list[Suggestion] = []
    shortest = min(length.seq_len for length in planned.lengths)
    if prints:
        print(f"\nNothing fits. Changes that need less memory, with {shortest} tokens per row:")
    for suggestion in suggestions(
        cfg, world_size=planned.world_size, card=planned.card, seq_len=shortest, traced_by=traced_by
    ):
        found.append(suggestion)
        if prints:
            print(f"- {suggestion_text(suggestion)}", flush=True)
    return found


def _memories(text: str | None, settings: AdaptiveSettings) -> dict[str, int]:
    """The memory in bytes of each GPU, by the name that the user gave."""
    if text is not None:
        return {name: memory_of(name) for name in text.split(",")}
    if settings.memory_limit_bytes is None:
        raise InputError("`--memory` must be a GPU's name or a size, as in H100 or 80GiB, but is missing.")
    return {format_bytes(settings.memory_limit_bytes): settings.memory_limit_bytes}


def _seq_lens(text: str | None, settings: AdaptiveSettings, cfg: DictConfig) -> list[int]:
    """Row lengths to plan: the user's, else the config's own, else the usual ones."""
    if text is not None:
        return integers("--seq-len", text)
    if settings.seq_len is not None:
        return [settings.seq_len]
    tokenizer_len, model_len = (_max_seq_len(cfg, block) for block in ("tokenizer", "model"))
    if tokenizer_len is not None:
        return [tokenizer_len]
    if model_len is None:
        return list(USUAL_SEQ_LENS)
    return [length for length in USUAL_SEQ_LENS if length <= model_len] or [model_len]


def _max_seq_len(cfg: DictConfig, block: str) -> int | None:
    values = cfg.get(block)
    length = values.get("max_seq_len") if isinstance(values, DictConfig) else None
    return None if length is None else require_integer(f"{block}.max_seq_len", length, minimum=1)

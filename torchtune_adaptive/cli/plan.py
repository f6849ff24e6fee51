"""``tune-adaptive plan``: predict which batch sizes of a config fit, without a GPU, weights or data."""

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.cli.arguments import Commands, add_command, integer, integers, missing_memory
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.changes import ways_to_fit, what_if
from torchtune_adaptive.plan.config_plan import ConfigLaunch, row_lengths
from torchtune_adaptive.plan.decide import Plan, PlannedChange
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.show.as_json import plan_json
from torchtune_adaptive.plan.show.grid import grid_text
from torchtune_adaptive.plan.show.plot import check_plot, write_plot
from torchtune_adaptive.plan.show.text import plan_text, what_if_text
from torchtune_adaptive.plan.trace.cache import user_cache_folder
from torchtune_adaptive.plan.trace.tracer import Tracer
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.checks import check_top_level_keys, check_values
from torchtune_adaptive.stock.configs import Method, load_config, method_of, resolved
from torchtune_adaptive.stock.installed import adaptive_name, recipe_files
from torchtune_adaptive.text import format_bytes

# Keys that no recipe for one device reads.
_OF_SEVERAL_RANKS = ("ac_mode", "ac_option", "fsdp_cpu_offload")


def add_plan(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "plan",
        "predict which batch sizes of a config fit, without a GPU",
        "plan --config llama3_1/8B_full --nproc_per_node 8 --memory H100 --seq-len 4096,8192",
        "plan --config llama3_1/8B_lora --memory A100-80GB --batch-size 1,2,4,8",
        "plan --config llama3_1/8B_full --memory H100 --batch-size 4 --plot step.svg",
        "plan --config llama3_1/8B_full --memory 24GiB,A100-80GB,H100 --nproc_per_node 1,2,4,8",
    )
    command.add_argument("--config", help="name or path of a config")
    command.add_argument(
        "--hf", metavar="MODEL", help="instead of a config: a Hugging Face model; `plan --hf MODEL --help` says more"
    )
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
    command.add_argument("--plot", type=Path, help="write a plot of a step's memory to this .svg file")
    command.add_argument("--json", action="store_true", help="print the plan as JSON")
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override a key of the config, as with `tune run`"
    )
    command.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.config is None:
        raise InputError("A plan needs either `--config` or `--hf`.")
    cfg = load_config(arguments.config, arguments.overrides)
    check_top_level_keys(cfg)
    settings = AdaptiveSettings.from_cfg(cfg)
    cfg = DictConfig(resolved(cfg))
    if cfg.get("device") is None:
        cfg.device = "cuda"  # a run would take the best that there is
    check_values(cfg, settings)
    method = method_of(cfg)  # refuse an unknown recipe before tracing
    nodes = integer("--nnodes", arguments.nnodes)
    ranks = integers("--nproc_per_node", arguments.nproc_per_node)  # of each machine
    cards = _cards(arguments, settings)
    if arguments.plot is not None:
        check_plot(arguments.plot)
    seq_lens = row_lengths(cfg, settings) if arguments.seq_len is None else integers("--seq-len", arguments.seq_len)
    batch_sizes = [] if arguments.batch_size is None else integers("--batch-size", arguments.batch_size)
    is_one = len(ranks) * len(cards) == 1
    for option in ("what_if", "plot"):
        if getattr(arguments, option) and not is_one:
            raise InputError(f"`--{option.replace('_', '-')}` needs one GPU and one number of ranks.")
    if arguments.what_if and len(batch_sizes) > 1:
        raise InputError(f"`--what-if` needs one `--batch-size`, not {arguments.batch_size}.")
    tracer = Tracer(user_cache_folder("plans"), shows_progress=True)
    launches = {
        card.name: [
            ConfigLaunch(
                title=arguments.config,
                cfg=cfg,
                card=card,
                world_size=per_node * nodes,
                ranks_of_machine=per_node,
                seq_lens=tuple(seq_lens),
                batch_sizes=tuple(batch_sizes),
                has_group=_recipe(cfg, method, per_node * nodes).endswith("_distributed"),
            )
            for per_node in ranks
        ]
        for card in cards
    }
    plans = {name: [launch.plan(tracer) for launch in row] for name, row in launches.items()}
    if is_one:
        ((launch,),) = launches.values()
        ((planned,),) = plans.values()
        command = _run_command(arguments, cfg, method, planned)
        _print_one(planned, launch, arguments, tracer=tracer, command=command)
    elif arguments.json:
        print(json.dumps([{"memory": name} | plan_json(one) for name, row in plans.items() for one in row], indent=2))
    else:
        print(grid_text(plans))


def _print_one(
    planned: Plan, launch: ConfigLaunch, arguments: argparse.Namespace, *, tracer: Tracer, command: str
) -> None:
    size, as_json = planned.decisive.chosen, arguments.json
    ways = [] if planned.fits else list(ways_to_fit(launch, planned, tracer))
    if not as_json:  # before what takes time, and may fail
        print(plan_text(planned, ways=ways, command=command), flush=True)
    effects: list[PlannedChange] = []
    if arguments.what_if:
        effects = list(what_if(replace(launch, batch_sizes=(size.batch_size,)), tracer))
        if not as_json:
            print(f"\n{what_if_text(effects)}", flush=True)
    if arguments.plot is not None:
        write_plot(arguments.plot, planned)
        if not as_json:
            print(f"\nPlot of the step written to {arguments.plot}.")
    if as_json:
        print(json.dumps(plan_json(planned, ways=ways, effects=effects), indent=2))


def _cards(arguments: argparse.Namespace, settings: AdaptiveSettings) -> list[Card]:
    """The GPUs to plan for, as the user named them."""
    if arguments.memory is None:
        if settings.memory_limit_bytes is None:
            raise missing_memory()
        return [Card(name=format_bytes(settings.memory_limit_bytes))]
    return list(map(Card.named, arguments.memory.split(",")))


def _recipe(cfg: DictConfig, method: Method, world_size: int) -> str:
    """The recipe that runs a config: on one rank the one for one device, if that can."""
    recipe = adaptive_name(f"{method}_single_device")
    only_on_several = any(cfg.get(key) for key in _OF_SEVERAL_RANKS)
    if world_size > 1 or only_on_several or recipe not in recipe_files():
        recipe = adaptive_name(f"{method}_distributed")
    return recipe


def _run_command(arguments: argparse.Namespace, cfg: DictConfig, method: Method, planned: Plan) -> str:
    """The command that runs what was planned; "" if nothing fits."""
    if not planned.fits:
        return ""
    recipe = _recipe(cfg, method, planned.world_size)
    launcher = [] if arguments.nnodes == "1" else ["--nnodes", arguments.nnodes]
    if recipe.endswith("_distributed"):
        launcher += ["--nproc_per_node", arguments.nproc_per_node]
    overrides = list(arguments.overrides)
    seq_len = planned.decisive.seq_len
    own_len = OmegaConf.select(cfg, "tokenizer.max_seq_len")
    if own_len != seq_len and (arguments.seq_len is not None or own_len is None):  # else `adaptive.seq_len` has set it
        overrides.append(f"tokenizer.max_seq_len={seq_len}")
    if planned.decisive.used.fits == "does not fit":
        has_budget = isinstance(OmegaConf.select(cfg, "adaptive.max_tokens_per_micro_batch"), int)
        overrides.append("adaptive.max_tokens_per_micro_batch=auto" if has_budget else "use_maximum_batch_size=True")
    return shlex.join(["tune", "run", *launcher, recipe, "--config", arguments.config, *overrides])

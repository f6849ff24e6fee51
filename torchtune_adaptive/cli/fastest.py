"""``tune-adaptive fastest``: find the settings that train fastest, and the command that trains with them."""

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.cli.arguments import PROGRAM, Commands, add_command
from torchtune_adaptive.cli.search import (
    check_recipe,
    cleared_found_path,
    config_in,
    launch_of,
    print_command,
    recipe_in,
)
from torchtune_adaptive.errors import InputError, quote, require_integer, require_one_of
from torchtune_adaptive.fastest.changes import KINDS, questions_of
from torchtune_adaptive.files import write_atomically, writing
from torchtune_adaptive.output import tolerate_lost_output
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.checks import check_config
from torchtune_adaptive.stock.configs import data_parallel_ranks, resolved
from torchtune_adaptive.training.signals import handled

_HELP = """Find the settings that train fastest among those that leave the training as it is, up to rounding.

Samples per optimizer step stay those of the config, or `adaptive.global_batch_size`. What changes is how many run at
once, in rows or in tokens, activation checkpointing and offloading, `compile`, resharding of weights, and chunks of
the loss. Each set-up is timed with micro-batches of several sizes on some steps of your data. OUTPUT_DIR/found.yaml is
the config with what is fastest, and the last line of the output is the command that trains with it.

options before TORCHRUN-OPTIONS, which are those of `tune run`:
  --minutes N   begin no set-up that would probably end later than this; the first one always ends [5]
  --try KINDS   what to change beside micro-batches: all of checkpointing,compile,resharding,loss by default"""


def add_fastest(commands: Commands) -> None:
    """Add the command for its help. ``run_fastest`` reads its arguments."""
    add_command(
        commands,
        "fastest",
        "find the settings that train fastest, and end",
        "fastest adaptive_lora_finetune_single_device --config llama3_2/1B_lora_single_device",
        "fastest --minutes 15 --nproc_per_node 8 adaptive_full_finetune_distributed --config llama3_1/8B_full",
        "fastest --try checkpointing adaptive_full_finetune_distributed --config tiny/full adaptive.memory_limit=1GiB",
        usage=f"{PROGRAM} fastest [--minutes N] [--try KINDS] [TORCHRUN-OPTIONS] RECIPE --config CONFIG"
        " [key=value ...]",
        description=_HELP,
    )


def run_fastest(arguments: Sequence[str]) -> None:
    """Time the settings that ``arguments`` allow, and print the command that trains with the fastest.

    Raises:
        InputError: a value is refused, or the config as it is cannot be timed.
    """
    tolerate_lost_output()  # the result is also in a file
    options, rest = _own_options(arguments)
    torchrun_options, recipe, recipe_args = recipe_in(rest)
    check_recipe(recipe)
    cfg = config_in(recipe_args)
    settings = AdaptiveSettings.from_cfg(cfg)
    _refuse(cfg, settings)
    check_config(cfg, ranks=1)
    whole = DictConfig(resolved(cfg))
    ranks = _ranks(torchrun_options, recipe)
    samples = settings.global_batch_size or _samples_of_step(whole, ranks)
    path = cleared_found_path(whole)

    from torchtune_adaptive.fastest.climb import Climb, Outcome, summary  # torch takes seconds to import
    from torchtune_adaptive.fastest.set_up import SetUps

    set_ups = SetUps(torchrun_options, recipe, cfg, samples, path.parent)

    def measure(words: str, values: Mapping[str, Any]) -> Outcome:
        print(f"{words} ...", flush=True)
        outcome = set_ups.measure(words, values)
        said = outcome.why_not or f"{outcome.timing.rate:.0f} tokens/s with {outcome.micro_batch}"
        print(f"{words}: {said} ({outcome.seconds:.0f} s)", flush=True)
        return outcome

    def plan(values: Mapping[str, Any]) -> int | None:
        return planned_rows(set_ups.config(values), ranks, set_ups.search_of(climb.best))

    climb = Climb(measure, plan, 60 * options.minutes)
    was_stopped = False
    try:
        # A request to end raises KeyboardInterrupt, as Ctrl-C does, so that no set-up stays behind.
        with handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):
            climb.run(questions_of(whole, recipe=recipe, ranks=ranks, kinds=options.kinds))
    except KeyboardInterrupt:
        if not any(one.timings for one in climb.outcomes):
            sys.exit(f"{PROGRAM} fastest: stopped before the config as it is was timed.")
        was_stopped = True
    best = climb.best
    if not best.timings:
        tried = "".join(f", nor with {one.words}" for one in climb.outcomes[1:] if one.seconds)
        raise InputError(f"The config cannot be timed as it is{tried}: {best.why_not}.")
    print(f"\n{summary(climb.outcomes, best)}\n", flush=True)  # before what may fail
    with writing("output_dir", path.parent, kind="folder"):
        header = f"# The settings that train fastest of those that were tried: {best.words}, {best.micro_batch}\n"
        write_atomically(path, header + OmegaConf.to_yaml(set_ups.found_config(best)))
    if was_stopped:
        print("Stopped before all was tried: this is the fastest so far.")
    if hint := _hint(whole):
        print(hint)
    print_command(torchrun_options, recipe, path)


def planned_rows(cfg: DictConfig, ranks: int, search: Any) -> int | None:
    """The most rows that fit by a plan, for the limit and the rows of ``search``. None if that cannot be planned."""
    from torchtune_adaptive.plan.config_plan import ConfigLaunch
    from torchtune_adaptive.plan.gpu import Card
    from torchtune_adaptive.plan.trace.cache import user_cache_folder
    from torchtune_adaptive.plan.trace.tracer import Tracer

    cfg = DictConfig(resolved(cfg))
    cfg.device = cfg.get("device") or "cuda"  # recipes take what there is
    OmegaConf.update(cfg, "adaptive.memory_limit", search.result.memory_limit_bytes)
    launch = ConfigLaunch(title="", cfg=cfg, card=Card(name=""), world_size=ranks, seq_lens=(search.seq_len,))
    try:
        planned = launch.plan(Tracer(user_cache_folder("plans"))).decisive
    except InputError:
        return None
    if planned.largest_batch_size == 0 and planned.used.fits != "does not fit":
        return None
    return planned.largest_batch_size


def _own_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's own options, and the other arguments.

    Raises:
        InputError: a value is refused.
    """
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} fastest", add_help=False, allow_abbrev=False)
    parser.add_argument("--minutes", default="5")
    parser.add_argument("--try", dest="kinds", default=",".join(KINDS))
    given, rest = parser.parse_known_args(arguments)
    try:
        given.minutes = float(given.minutes)
    except ValueError:
        raise InputError(f"`--minutes` must be a number, but is {quote(given.minutes)} instead.") from None
    if not given.minutes > 0:
        raise InputError(f"`--minutes` must be above 0, but is {given.minutes:g} instead.")
    given.kinds = given.kinds.split(",")
    for kind in given.kinds:
        require_one_of("--try", kind, KINDS)
    return given, rest


def _refuse(cfg: DictConfig, settings: AdaptiveSettings) -> None:
    """Refuse settings that leave nothing to compare."""
    if "ppo_epochs" in cfg:
        raise InputError("`fastest` cannot time the steps of PPO: use `tune-adaptive search`.")
    if cfg.get("optimizer_in_bwd", False):
        raise InputError("`fastest` cuts a step into micro-batches: it needs `optimizer_in_bwd: False`.")
    if settings.batch_increase_function is not None:
        raise InputError("`fastest` keeps the samples of a step: leave `batch_increase_function` out.")
    if settings.max_tokens_per_micro_batch is not None:
        raise InputError(
            f"`fastest` chooses rows or tokens itself: leave `max_tokens_per_micro_batch:"
            f" {settings.max_tokens_per_micro_batch}` out."
        )
    if settings.lr_scaling != "none":
        raise InputError(f"`fastest` keeps the samples of a step: leave `lr_scaling: {settings.lr_scaling}` out.")


def _ranks(torchrun_options: Sequence[str], recipe: str) -> int:
    """Ranks of the launch, which is on one machine.

    Raises:
        InputError: it is on several, or their number is not known.
    """
    launch = launch_of(torchrun_options, recipe)
    if launch.nnodes not in ("1", "1:1"):
        raise InputError(
            f"`--nnodes` must be 1 for `fastest`, which times a single machine, but is {quote(launch.nnodes)} instead."
        )
    return launch.nproc_per_node


def _samples_of_step(cfg: DictConfig, ranks: int) -> int:
    """Samples of an optimizer step over all ranks, by torchtune's keys.

    Raises:
        InputError: a key is no number of rows or micro-steps.
    """
    rows = require_integer("batch_size", cfg.get("batch_size"), minimum=1)
    micro_steps = require_integer("gradient_accumulation_steps", cfg.get("gradient_accumulation_steps", 1), minimum=1)
    return rows * micro_steps * data_parallel_ranks(cfg, ranks)


def _hint(cfg: DictConfig) -> str:
    """What was not tried, as it would change what is trained."""
    dataset = cfg.get("dataset")
    if isinstance(dataset, DictConfig) and not dataset.get("packed") and not cfg.tokenizer.get("packed"):
        return (
            "Not tried, as a step would then have other samples: `dataset.packed=True`, which leaves less padding"
            " (torchtune's data sets; it needs `tokenizer.max_seq_len`)."
        )
    return ""

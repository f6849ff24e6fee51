"""``tune-adaptive``: plan what fits without a GPU; calibrate what a GPU adds to a plan.

tune-adaptive plan --config llama3_1/8B_full --nproc_per_node 8 --memory H100 --seq-len 4096,8192 [key=value ...]
tune-adaptive plan --config llama3_1/8B_lora --memory A100-80GB --batch-size 1,2,4,8
tune-adaptive calibrate --output h100.json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig

from torchtune_adaptive.errors import InputError, require_integer
from torchtune_adaptive.plan.calibration import calibrate
from torchtune_adaptive.plan.client import calibration_peak, trace
from torchtune_adaptive.plan.gpus import memory_of
from torchtune_adaptive.plan.plan import USUAL_SEQ_LENS, Card, Plan, plan
from torchtune_adaptive.plan.report import plan_json, plan_text, suggestion_text
from torchtune_adaptive.plan.suggestions import Suggestion, suggestions
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import load_config, method_of, resolved

_TRACE = partial(trace, shows_progress=True)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program. A refused value ends it with one sentence on standard error and status 1."""
    parser = _parser()
    parsed, others = parser.parse_known_args(arguments)  # overrides may stand anywhere, as for `tune run`
    if others and (parsed.command != "plan" or any(other.startswith("-") for other in others)):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    parsed.overrides = [*vars(parsed).get("overrides", []), *others]
    try:
        parsed.run(parsed)
    except InputError as error:
        sys.exit(f"tune-adaptive {parsed.command}: {error}")
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tune-adaptive", description="The largest batch of a torchtune config.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("plan", help="what fits of a config, found without a GPU, weights or data")
    command.add_argument("--config", required=True, help="name of a stock config or of ours, or a path")
    command.add_argument("--nproc_per_node", "--nproc-per-node", default="1", help="ranks on a machine [1]")
    command.add_argument("--nnodes", default="1", help="machines [1]")
    command.add_argument(
        "--memory", help="memory of each rank's GPU: its name (H100) or a size (80GiB) [adaptive.memory_limit]"
    )
    command.add_argument("--seq-len", help="tokens of a row, or several lengths with commas between [the config's]")
    command.add_argument("--batch-size", help="rows per rank, or several numbers: what each takes, and whether it fits")
    command.add_argument("--calibration", type=Path, help="file that `tune-adaptive calibrate` wrote on such a GPU")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="as for `tune run`")
    command.set_defaults(run=_plan)
    command = commands.add_parser("calibrate", help="measure what this machine's GPU adds to a plan")
    command.add_argument("--output", required=True, type=Path, help="file to write")
    command.add_argument("--device-index", default="0", help="which GPU [0]")
    command.set_defaults(run=_calibrate)
    return parser


def _plan(arguments: argparse.Namespace) -> None:
    cfg = load_config(arguments.config, arguments.overrides)
    settings = AdaptiveSettings.from_cfg(cfg)
    cfg = DictConfig(resolved(cfg))
    method_of(cfg)  # refused before anything is traced
    per_node = _integer("nproc_per_node", arguments.nproc_per_node)
    world_size = per_node * _integer("nnodes", arguments.nnodes)
    card = Card(memory_bytes=_memory_bytes(arguments.memory, settings), calibration=arguments.calibration)
    seq_lens = _seq_lens(arguments.seq_len, settings, cfg)
    batch_sizes = [] if arguments.batch_size is None else _integers("batch_size", arguments.batch_size)
    planned = plan(cfg, world_size=world_size, card=card, seq_lens=seq_lens, batch_sizes=batch_sizes, traced_by=_TRACE)
    if not arguments.json:
        print(plan_text(planned, title=arguments.config))
    helpful = [] if planned.fits else _suggest(planned, cfg, prints=not arguments.json)
    if arguments.json:
        print(json.dumps(plan_json(planned, helpful), indent=2))


def _suggest(planned: Plan, cfg: DictConfig, *, prints: bool) -> list[Suggestion]:
    """Plan suggestions for the shortest rows of ``planned``; print each as soon as it is planned if ``prints``."""
    found: list[Suggestion] = []
    shortest = min(length.seq_len for length in planned.lengths)
    if prints:
        print(f"\nNothing fits. With rows of {shortest} tokens:")
    for suggestion in suggestions(
        cfg, world_size=planned.world_size, card=planned.card, seq_len=shortest, traced_by=_TRACE
    ):
        found.append(suggestion)
        if prints:
            print(f"- {suggestion_text(suggestion)}", flush=True)
    return found


def _calibrate(arguments: argparse.Namespace) -> None:
    index = _integer("device_index", arguments.device_index, minimum=0)
    measured = calibrate(arguments.output, forecast_peak=calibration_peak, device_index=index)
    print(f"Calibration of {measured.gpu} written to {arguments.output}: {measured}")


def _memory_bytes(text: str | None, settings: AdaptiveSettings) -> int:
    if text is not None:
        return memory_of(text)
    if settings.memory_limit_bytes is None:
        raise InputError("`--memory` must be a GPU's name or a size, as in H100 or 80GiB, but is missing.")
    return settings.memory_limit_bytes


def _seq_lens(text: str | None, settings: AdaptiveSettings, cfg: DictConfig) -> list[int]:
    """Row lengths to plan: those asked for, else the config's own, else the usual ones."""
    if text is not None:
        return _integers("seq_len", text)
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


def _integers(name: str, text: str) -> list[int]:
    """Numbers with commas between."""
    return [_integer(name, part) for part in text.split(",")]


def _integer(name: str, text: str, *, minimum: int = 1) -> int:
    try:
        value: object = int(text)
    except ValueError:
        value = text  # which the check refuses and quotes
    return require_integer(name, value, minimum=minimum)


if __name__ == "__main__":
    main()

"""``tune-adaptive plan --hf``: predict which batch sizes of a Hugging Face model fit. It needs no torchtune."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchtune_adaptive.cli.arguments import PROGRAM, integer, integers, missing_memory
from torchtune_adaptive.errors import InputError, require_integer, require_one_of
from torchtune_adaptive.output import quietly
from torchtune_adaptive.plan.gpu import Card
from torchtune_adaptive.plan.hugging_face.run_keys import TRAINERS, Arguments, RunKeys, read_keys

_EPILOG = f"""keys are those of the trainer's arguments, such as SFTConfig, and of TRL's ModelConfig.
A dot names a key of a mapping, as in fsdp_config.cpu_offload=True.

examples:
  {PROGRAM} plan --hf mistralai/Mistral-7B-v0.1 --memory RTX4090 use_peft=True load_in_4bit=True dtype=bfloat16
  {PROGRAM} plan --hf Qwen/Qwen3-8B --nproc_per_node 8 --memory H100 fsdp=True max_length=4096
  {PROGRAM} plan --hf Qwen/Qwen3-8B --trainer dpo --training-args dpo.yaml --memory H200"""


def names_model(arguments: Sequence[str]) -> bool:
    """Whether the program's arguments ask for this plan."""
    named = (one == "--hf" or one.startswith("--hf=") for one in arguments)
    return list(arguments[:1]) == ["plan"] and any(named)


def plan_model(arguments: Sequence[str]) -> None:
    """Plan what the arguments after `plan` ask for, and print it.

    Raises:
        InputError: a value is refused, or the run cannot be planned.
    """
    parser = parser_of_models()
    given, others = parser.parse_known_args(arguments)  # keys may stand anywhere
    if given.config is not None:
        raise InputError("A plan takes either `--config` or `--hf`, not both.")
    if any(one.startswith("-") for one in others):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if given.memory is None:
        raise missing_memory()
    card = Card.named(given.memory)
    ranks = integer("--nproc_per_node", given.nproc_per_node) * integer("--nnodes", given.nnodes)
    seq_len = None if given.seq_len is None else integer("--seq-len", given.seq_len)
    mean_len = None if given.mean_len is None else integer("--mean-len", given.mean_len)
    asked = [] if given.batch_size is None else integers("--batch-size", given.batch_size)
    require_one_of("--trainer", given.trainer, TRAINERS)
    keys = read_keys(given.training_args, [*given.keys, *others])
    size_key = "per_device_train_batch_size"
    training = RunKeys.of(keys, Arguments.of(given.trainer)).training  # refuses keys before torch is imported
    used = require_integer(size_key, training[size_key], minimum=1) if size_key in training else None

    from torchtune_adaptive.engine.memory.out_of_memory import only_new_garbage  # torch takes seconds to import
    from torchtune_adaptive.plan.any_loop import LoopPlan, plan_of_loop
    from torchtune_adaptive.plan.hugging_face.changes import ways_to_fit
    from torchtune_adaptive.plan.hugging_face.run import UNCERTAINTY, HuggingFaceRun
    from torchtune_adaptive.plan.hugging_face.tracing import RunTracer
    from torchtune_adaptive.plan.show.as_json import plan_json
    from torchtune_adaptive.plan.show.text import plan_text

    def plan(run: HuggingFaceRun, batch_sizes: Sequence[int], used: int | None = None) -> LoopPlan:
        return plan_of_loop(
            RunTracer(run).trace(),
            card,
            ranks=run.ranks,
            overhead=replace(card.overhead(run.ranks, has_group=run.ranks > 1), uncertainty=UNCERTAINTY),
            batch_sizes=batch_sizes,
            title=f"{given.hf}, samples of {run.seq_len} tokens",
            assumptions=run.assumptions,
            used=used,
        )

    with quietly():
        run = HuggingFaceRun.of(
            given.hf, trainer=given.trainer, keys=keys, seq_len=seq_len, ranks=ranks, mean_len=mean_len
        )
        planned = plan(run, asked, used)
        with only_new_garbage():
            ways = [] if planned.fits else list(ways_to_fit(run, planned, lambda changed: plan(changed, [1])))
    print(json.dumps(plan_json(planned, ways=ways), indent=2) if given.json else plan_text(planned, ways=ways))


def parser_of_models() -> argparse.ArgumentParser:
    """The parser of this plan's arguments."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} plan",
        description="Predict which batch sizes of a Hugging Face model fit in its trainer, without a GPU or weights.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--hf", metavar="MODEL", required=True, help="a folder with a config.json, or a name on the Hub"
    )
    parser.add_argument("--config", help=argparse.SUPPRESS)  # refused
    parser.add_argument("--memory", help="memory of each GPU: a name (H100) or a size (80GiB)")
    parser.add_argument("--trainer", default="sft", help="sft or dpo of TRL, or transformers for its Trainer [sft]")
    parser.add_argument(
        "--training-args", metavar="FILE", type=Path, help="JSON or YAML with keys, as for `trl sft --config`"
    )
    parser.add_argument("--nproc_per_node", "--nproc-per-node", default="1", help="GPUs per machine [1]")
    parser.add_argument("--nnodes", default="1", help="number of machines [1]")
    parser.add_argument("--seq-len", help="tokens of the longest row [`max_length`]")
    parser.add_argument("--mean-len", help="tokens of an average row [one less than --seq-len; as many if packed]")
    parser.add_argument("--batch-size", help="also plan this batch size per rank, or several")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of the trainer's arguments or of the model")
    return parser

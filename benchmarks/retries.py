"""May a search use a size whose step fits only because the allocator frees its cache?

    .venv-simulated-gpu/bin/python -m benchmarks.retries

Tries sizes near the largest on a simulated GPU: steps of equal rows, and steps of rows of different lengths.
"""

import json
import random
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.apart import CARD_GIB, in_process, write_and_end
from benchmarks.plan_accuracy import CASES, GIB, Case, _planned
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table

RESULTS = Path(__file__).parent / "results" / "retries_simulated.md"
NAMES = (
    *("1B full", "3B full", "8B full", "1B full, checkpointing", "1B LoRA, checkpointing"),
    *("1B LoRA", "3B LoRA", "1B LoRA, rows of 300", "1B full, rows of 512"),
)
EQUAL_STEPS, OTHER_STEPS, LONGEST_EVERY = 12, 80, 10
HEADER = ["case", "limit, GiB", "rows", "first step", "next 11 steps", "80 steps of different rows: OOMs", "retries"]

ABOUT = f"""\
A step fits *with a retry* if torch's allocator had to free its cache in it. The first steps have rows of the greatest
length, as probes of a search have. Then come {OTHER_STEPS} steps with rows of different lengths (log-normal, their
median a quarter of the greatest; each tenth step has a longest row), in which memory that ran out was freed again.
The limits are used whole, without a margin. For each limit: the largest size without a retry, and all with one.
"""


def sizes_tried(case: Case) -> list[dict[str, Any]]:
    """What steps of each size near a limit showed."""
    import torch

    from benchmarks.live import loop_of, probe_maker, real_steps
    from benchmarks.on_gpu.random_recipe import live_random_recipe, random_config, start_group
    from benchmarks.on_gpu.stage import stage_for
    from torchtune_adaptive.engine.distributed.snapshot import UnchangedParameters
    from torchtune_adaptive.engine.memory.out_of_memory import free_memory, is_out_of_memory
    from torchtune_adaptive.training.sizes import probe_batch

    UnchangedParameters.first_changed = lambda self: ""  # a simulated GPU has no values
    planned = _planned(replace(case, sizes=()))["largest"]
    stage = replace(stage_for(Path(tempfile.mkdtemp()), seconds=3600), seq_len=case.seq_len)
    start_group(stage)
    changes = {"use_maximum_batch_size": False, **case.changes}
    recipe = live_random_recipe(random_config(stage, case.config, num_rows=4096, **changes))
    loop, make_batch, parts, cuda = loop_of(recipe, is_metered=False), probe_maker(recipe), recipe.parts, torch.cuda
    row = make_batch(1)[0].rows[0]

    def retries_of(rows: int, longest: int) -> int | None:
        """The retries of a step whose longest row has so many tokens; None if memory ran out."""
        before = cuda.memory_stats()["num_alloc_retries"]
        stretched = parts.row_format.stretched(dict(row), longest)
        try:
            loop.step(probe_batch(stretched, rows, micro_steps=parts.micro_steps))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            error.__traceback__ = None
        else:
            return cuda.memory_stats()["num_alloc_retries"] - before
        loop.clean_up()
        free_memory(stage.device)
        return None

    found = []
    with real_steps(recipe, loop_of(recipe), limit_bytes=None):
        for limit, largest in planned.items():
            cuda.set_per_process_memory_fraction(float(limit) * GIB / cuda.mem_get_info()[1])
            for rows in range(max(1, largest), largest + 4):
                free_memory(stage.device)
                equal = [retries_of(rows, case.seq_len)]
                if equal[0] is None:
                    break
                equal += [retries_of(rows, case.seq_len) for _ in range(EQUAL_STEPS - 1)]
                free_memory(stage.device)
                dice = random.Random(rows)
                others = [retries_of(rows, length) for length in _longest_rows(dice, case.seq_len, rows)]
                found.append({"limit": limit, "rows": rows, "equal": equal, "others": others})
            cuda.set_per_process_memory_fraction(1.0)
    return found


def _longest_rows(dice: random.Random, seq_len: int, rows: int) -> Iterator[int]:
    """The longest row of each step of rows of different lengths."""
    for step in range(1, OTHER_STEPS + 1):
        drawn = [int(0.25 * seq_len * dice.lognormvariate(0.0, 0.7)) for _ in range(rows)]
        yield seq_len if step % LONGEST_EVERY == 0 else min(seq_len, max(8, *drawn))


def _cells(name: str, one: dict[str, Any]) -> list[str]:
    first, *later = one["equal"]
    ooms, retries = one["others"].count(None), sum(filter(None, one["others"]))
    words = f"{sum(map(bool, later))} with retries" if None not in later else f"out of memory, {later.count(None)} x"
    return [name, one["limit"], str(one["rows"]), f"{first} retries", words, str(ooms), str(retries)]


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--case")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.case:
        write_and_end(sizes_tried(CASES[arguments.case]), arguments.out)
    started, rows = time.perf_counter(), list[list[str]]()
    seen: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            found = in_process("benchmarks.retries", ["--case", name], Path(folder) / "out.json")
            for limit in dict.fromkeys(one["limit"] for one in found):
                of_limit = [one for one in found if one["limit"] == limit]
                clean = [one for one in of_limit if not one["equal"][0]][-1:]
                retried = [one for one in of_limit if one["equal"][0]]
                rows += [_cells(name, one) for one in (*clean, *retried)]
                seen[False] += clean
                seen[True] += retried
            print(name, json.dumps(rows[-3:]), file=sys.stderr)
    lines = ["# Sizes that fit only because the allocator frees its cache", ""]
    lines += [
        provenance(
            "python -m benchmarks.retries",
            seconds=time.perf_counter() - started,
            device=f"a simulated GPU of {CARD_GIB} GiB",
        )
    ]
    lines += ["", ABOUT]
    for retried, words in ((False, "without a retry in the first step"), (True, "with one")):
        steps = OTHER_STEPS * len(seen[retried])
        ooms = sum(one["others"].count(None) for one in seen[retried])
        lines += [f"- {len(seen[retried])} sizes {words}: {ooms} of {steps} steps of different rows ran out of memory."]
    publish([*lines, "", *table(HEADER, rows)], RESULTS)


if __name__ == "__main__":
    main()

"""Is the traced memory of a user's own loop right? Models of transformers and peft, against real steps on a CPU.

    python -m benchmarks.loop_accuracy [--seed SEED] [--cases CASES] [--output FILE]

Draws small models, ranks and loops at random. For each, ``plan.trace.loop.trace_loop`` predicts the peak of a step as a
CPU takes it; then the same functions take real steps on gloo ranks, measured by the search's meter. Prints a table and
writes it to ``results/loop_accuracy_cpu.md``; the exit status is not 0 if a peak differs by a byte. It runs in the
environment of ``make .venv-integrations/stamp``, which has neither torchtune nor torchao: peft has no LoRA beside the
torchao that torchtune needs.
"""

import argparse
import contextlib
import gc
import importlib
import logging
import math
import os
import random
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.apart import measured_by_ranks
from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from torchtune_adaptive.engine.memory.devices import meter_for
from torchtune_adaptive.engine.memory.phases import phases_by_hooks
from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.replay import StepMemory, exact
from torchtune_adaptive.plan.trace.loop import TracedLoop, trace_loop

RESULTS = Path(__file__).parent / "results" / "loop_accuracy_cpu.md"
FAMILIES = ("Llama", "Qwen2", "Gemma", "Mistral", "Qwen3", "Gemma2")
MEASURED_SAMPLES = (1, 2, 3, 7)
DRAWN_RANKS = (1, 2, 1)
PRECISIONS = ("float32", "bfloat16", "autocast")
CHECKPOINTING = ("none", "reentrant", "not reentrant")
OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "foreach": True}),
    ("Adafactor", {}),
)


@dataclass(frozen=True)
class Case:
    """A user's loop: its four functions, and what they depend on.

    Attributes:
        sizes: the options of the model's config that are numbers.
        ranks: more than one are sharded by FSDP2.
        masked: the batch has an attention mask, in which nothing is masked.
    """

    number: int
    family: str
    sizes: dict[str, int]
    tied: bool
    attention: str
    lora: bool
    precision: str
    checkpointing: str
    optimizer: tuple[str, dict[str, Any]]
    micro_steps: int
    clips: bool
    masked: bool
    num_tokens: int
    ranks: int

    @property
    def name(self) -> str:
        """The case in words."""
        sizes, (optimizer, options) = self.sizes, self.optimizer
        words = [f"{'LoRA ' if self.lora else ''}{self.family}"]
        words[0] += f" {sizes['num_hidden_layers']} x {sizes['hidden_size']}, {self.num_tokens} tokens"
        words += ["tied"] * self.tied + [self.attention, self.precision]
        words += [f"checkpointing {self.checkpointing}"] * (self.checkpointing != "none")
        words += [" ".join([optimizer, *options]), f"accumulation {self.micro_steps}"]
        return ", ".join([*words, *["clip"] * self.clips, *["mask"] * self.masked])

    def build_model(self) -> nn.Module:
        """The model, on the present device."""
        transformers: Any = importlib.import_module("transformers")  # neither is in the environment for development
        config = getattr(transformers, f"{self.family}Config")(
            vocab_size=384, tie_word_embeddings=self.tied, max_position_embeddings=256, pad_token_id=0, **self.sizes
        )
        dtype = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=self.attention
        )
        layers = model.model.layers
        if self.lora:
            peft: Any = importlib.import_module("peft")
            projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=projections)
            )
            model.enable_input_require_grads()
        if self.checkpointing != "none":
            model.gradient_checkpointing_enable({"use_reentrant": self.checkpointing == "reentrant"})
        if self.ranks > 1:
            for layer in layers:
                fully_shard(layer)
            fully_shard(model)
        return model.train()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the trained parameters."""
        name, options = self.optimizer
        return getattr(torch.optim, name)([one for one in model.parameters() if one.requires_grad], lr=1e-4, **options)

    def train_step(self, model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
        """A step of ``micro_steps`` passes through the batch; returns the last loss."""
        cast: Any = contextlib.nullcontext()
        loss = torch.zeros(())
        for _ in range(self.micro_steps):
            if self.precision == "autocast":
                cast = torch.autocast("cpu", torch.bfloat16)
            with cast:
                loss = model(**batch, labels=batch["input_ids"]).loss / self.micro_steps
            loss.backward()
        if self.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def make_batch(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Samples of random tokens."""
        batch = {"input_ids": torch.randint(1, 384, (num_samples, self.num_tokens))}
        if self.masked:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        return batch


def draw_cases(seed: int, count: int) -> list[Case]:
    """``count`` cases; the same seed gives the same cases, and a larger count begins with those of a smaller one."""
    dice = random.Random(seed)
    return [_draw_case(number, dice) for number in range(count)]


def _draw_case(number: int, dice: random.Random) -> Case:
    family = FAMILIES[number % len(FAMILIES)]
    kv_heads = dice.choice([1, 2, 4])
    heads, head_dim = kv_heads * dice.choice([1, 2]), 8 * dice.randint(1, 4)
    sizes = {
        "num_hidden_layers": dice.randint(2, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": heads * head_dim,
        "intermediate_size": dice.randint(1, 4) * heads * head_dim,
    }
    return Case(
        number,
        family,
        sizes,
        tied=dice.random() < 0.5,
        attention="eager" if family == "Gemma2" else dice.choice(["sdpa", "sdpa", "eager"]),
        lora=dice.random() < 0.5,
        precision=dice.choice(PRECISIONS),
        checkpointing=CHECKPOINTING[number // 2 % len(CHECKPOINTING)],
        optimizer=dice.choice(OPTIMIZERS),
        micro_steps=dice.randint(1, 3),
        clips=dice.random() < 0.5,
        masked=dice.random() < 0.5,
        num_tokens=dice.randint(5, 60),
        ranks=DRAWN_RANKS[number % len(DRAWN_RANKS)],
    )


@dataclass(frozen=True)
class Measured:
    """A real step of ``num_samples``: its peak, that of each phase, and the operation at the peak."""

    num_samples: int
    peak_bytes: int
    phase_peak_bytes: dict[str, int]
    operation: str


def measure(rank: int, cases: list[Case]) -> list[list[Measured]]:
    """Real steps of every case. A collective of as many ranks as the cases are for."""
    _quiet()
    return [_measured(case) for case in cases]


def _measured(case: Case) -> list[Measured]:
    torch.manual_seed(0)
    model = case.build_model()
    optimizer = case.build_optimizer(model)
    case.train_step(model, optimizer, case.make_batch(2))
    found: list[Measured] = []
    for num_samples in MEASURED_SAMPLES:
        gc.collect()
        meter = meter_for(torch.device("cpu"), model, [optimizer])
        batch = case.make_batch(num_samples)
        meter.count(batch)
        meter.reset()
        meter.enter_phase("forward")
        meter.start_timeline()
        with phases_by_hooks(model, [optimizer], meter.enter_phase), meter:
            case.train_step(model, optimizer, batch)
        timeline = meter.stop_timeline(num_samples)
        place = max(range(len(timeline.operations)), key=timeline.live_bytes.__getitem__)
        found.append(Measured(num_samples, meter.peak_bytes, meter.phase_peak_bytes, timeline.operations[place]))
    return found


@dataclass(frozen=True)
class Comparison:
    """A traced loop, or why there is none, against the steps of each rank."""

    case: Case
    traced: TracedLoop | str
    seconds: float
    ranks: list[list[Measured]]

    @property
    def largest_error_bytes(self) -> float:
        """The largest difference of the peak of any size on rank 0."""
        return max((abs(error) for error in self._errors()), default=math.inf)

    @property
    def phase_error_bytes(self) -> float:
        """The largest difference in any phase of any size on rank 0."""
        if isinstance(self.traced, str):
            return math.inf
        return max(
            abs(self._memory(one.num_samples).phases.get(phase, math.inf) - peak_bytes)
            for one in self.ranks[0]
            for phase, peak_bytes in one.phase_peak_bytes.items()
        )

    def misses(self) -> str:
        """What differs, in words; "" if nothing does."""
        if isinstance(self.traced, str):
            return self.traced
        for one, error in zip(self.ranks[0], self._errors(), strict=True):
            if error:
                memory = self._memory(one.num_samples)
                traced = memory.events[memory.live_bytes.index(memory.allocated_bytes)].operation
                return f"{error:+.0f} bytes at {one.num_samples}: traced at {traced}, measured at {one.operation}"
        return ""

    def _errors(self) -> list[float]:
        if isinstance(self.traced, str):
            return []
        return [self._memory(one.num_samples).allocated_bytes - one.peak_bytes for one in self.ranks[0]]

    def _memory(self, num_samples: int) -> StepMemory:
        assert isinstance(self.traced, TracedLoop)
        return exact(self.traced.step.at(num_samples))


def compare(cases: list[Case]) -> list[Comparison]:
    """Trace and measure ``cases``."""
    traced = [_traced(case) for case in Bar(cases, desc="traces", unit=" cases")]
    return [
        Comparison(case, *one, ranks)
        for case, one, ranks in zip(cases, traced, measured_by_ranks(measure, cases), strict=True)
    ]


def _traced(case: Case) -> tuple[TracedLoop | str, float]:
    """The traced loop, or why there is none, and the seconds that it took."""
    started = time.perf_counter()
    functions = case.build_model, case.build_optimizer, case.train_step, case.make_batch
    try:
        traced = trace_loop(*functions, ranks=case.ranks, like_cuda=False)
    except InputError as error:
        return f"not traced: {error}", time.perf_counter() - started
    return traced, time.perf_counter() - started


def _quiet() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def main() -> None:
    """Measure the cases, write the table, and exit with status 1 if a peak differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop_accuracy")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--cases", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS, help="default: %(default)s")
    options = parser.parse_args()
    _quiet()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    compared = compare(draw_cases(options.seed, options.cases))
    _report(compared, options, seconds=time.perf_counter() - started)
    sys.exit(any(one.misses() for one in compared))


def _report(compared: list[Comparison], options: argparse.Namespace, *, seconds: float) -> None:
    command = f"python -m benchmarks.loop_accuracy --seed {options.seed} --cases {options.cases}"
    exact = sum(one.largest_error_bytes == 0 for one in compared)
    in_phases = sum(one.phase_error_bytes == 0 for one in compared)
    header = ["", "loop", "ranks", "samples: peak, bytes", "largest error, bytes", "in a phase", "trace, s", "differs"]
    packages = ("torch", "transformers", "peft")
    publish(
        options.output,
        "Traced memory of users' loops against real steps, CPU",
        provenance(command, ranks="gloo ranks of 1 thread", seconds=seconds, packages=packages),
        f"{exact} of {len(compared)} loops have the traced peak to the byte, at each of"
        f" {', '.join(map(str, MEASURED_SAMPLES))} samples; {in_phases} in each phase as well. The trace ran at"
        " 1, 2 and 3 samples. Measured is rank 0.",
        table(header, map(_row, compared)),
    )


def _row(one: Comparison) -> list[str]:
    peaks = "; ".join(f"{step.num_samples}: {step.peak_bytes:,}" for step in one.ranks[0])
    errors = [f"{one.largest_error_bytes:.0f}", f"{one.phase_error_bytes:.0f}"]
    return [
        str(one.case.number),
        one.case.name,
        str(one.case.ranks),
        peaks,
        *errors,
        f"{one.seconds:.1f}",
        one.misses(),
    ]


if __name__ == "__main__":
    main()

"""Does every stock config start? Each is run by the adaptive recipe for two steps with a search, on a tiny model.

    OMP_NUM_THREADS=1 python -m benchmarks.stock_starts

Takes every text config that torchtune registers for a recipe that has an adaptive version. Model, checkpoint, tokenizer
and data are replaced by tiny ones; everything else stays as it is. Distributed recipes run on two CPU ranks. Writes a
table to ``results/stock_starts_cpu.md``. Ends with status 1 if a config neither starts nor is refused.
"""

import inspect
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune._recipe_registry import get_all_recipes
from torchtune.models.llama2 import llama2, lora_llama2
from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.support.ranks import RanksFailedError, run_alone, run_on_ranks
from benchmarks.support.recipe_runs import (
    RECIPES,
    TEACHER_NAME,
    RecordingLogger,
    adaptive_recipe,
    finished,
    shallow_assets,
)
from benchmarks.tables import publish, table
from torchtune_adaptive.errors import InputError, reason_of
from torchtune_adaptive.stock.configs import load_config
from torchtune_adaptive.tiny import DATA_NAME, MODEL_GEOMETRY, MODEL_NAME, PAIRS_NAME, TOKENIZER_NAME, make_tiny_assets

RESULTS = Path(__file__).parent / "results" / "stock_starts_cpu.md"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.stock_starts"
KINDS = {module.removeprefix("adaptive_"): kind for kind, (module, _) in RECIPES.items()}
STEPS, GROUP_SIZE = 2, 32
# NF4 has a scale for each 64 values, and a scale of scales for each 256 of these: wide enough for two ranks.
WIDE_NAME, WIDE = "wide.pt", MODEL_GEOMETRY | {"num_layers": 2, "embed_dim": 256, "intermediate_dim": 512}
STARTED, REFUSED, FAILED = OUTCOMES = ("started", "refused", "failed")


@dataclass(frozen=True)
class Start:
    """The result of a config: ``outcome``, and the size found or the reason."""

    recipe: str
    name: str
    outcome: str
    detail: str


def main() -> None:
    """Start all configs, and write the table."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        make_tiny_assets(Path(directory) / "tiny", num_samples=400)
        assets = shallow_assets(Path(directory) / "tiny")
        torch.save(llama2(**WIDE).state_dict(), assets / WIDE_NAME)
        configs = text_configs()
        starts = [start(recipe, name, assets) for recipe, name in tqdm(configs, unit=" configs")]
    publish(document(starts, seconds=time.perf_counter() - started), RESULTS)
    raise SystemExit(any(one.outcome == FAILED for one in starts))


def text_configs() -> list[tuple[str, str]]:
    """Recipe and name of all configs that have an adaptive recipe, except those with images."""
    registered = [(recipe.name, config.name) for recipe in get_all_recipes() for config in recipe.configs]
    return [(recipe, name) for recipe, name in registered if recipe in KINDS and "vision" not in name]


def start(recipe: str, name: str, assets: Path) -> Start:
    """Run the config, on two ranks if its recipe is a distributed one."""
    with tempfile.TemporaryDirectory() as output_dir:
        arguments = KINDS[recipe], name, assets, Path(output_dir)
        try:
            if recipe.endswith("single_device"):
                outcome, detail = run_alone(_start, *arguments)
            else:
                outcome, detail = run_on_ranks(_start_rank, 2, *arguments)[0]
        except RanksFailedError as error:
            return Start(recipe, name, FAILED, str(error).strip().splitlines()[-1])
    return Start(recipe, name, outcome, detail)


def _start_rank(rank: int, *arguments: Any) -> tuple[str, str]:
    return _start(*arguments)


def _start(kind: str, name: str, assets: Path, output_dir: Path) -> tuple[str, str]:
    cfg = tiny_version(load_config(name), assets, output_dir)
    try:
        _, _, recipe = finished(adaptive_recipe(kind), cfg)
    except InputError as error:
        return REFUSED, str(error)
    except Exception as error:
        return FAILED, reason_of(error)
    assert recipe.trainer.global_step == STEPS
    found = recipe.trainer.sizes.result
    return STARTED, f"{found.exact_batch_size} of {found.bound}"


def tiny_version(cfg: DictConfig, assets: Path, output_dir: Path) -> DictConfig:
    """The config with tiny model, checkpoint, tokenizer and data, and with keys that keep the run short."""
    model = _tiny_model(cfg.model)
    checkpointer = {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(assets),
        "checkpoint_files": [WIDE_NAME if model.get("quantize_base") else MODEL_NAME],
        "recipe_checkpoint": None,
        "output_dir": str(output_dir),
        "model_type": "LLAMA2",
    }
    changes: dict[str, Any] = {
        "device": "cpu",
        "output_dir": str(output_dir),
        "epochs": 1,
        "max_steps_per_epoch": STEPS,
        "seed": 0,
        "metric_logger": {"_component_": f"{RecordingLogger.__module__}.{RecordingLogger.__name__}"},
        "model": model,
        "checkpointer": checkpointer,
        "tokenizer": {
            "_component_": "torchtune.models.llama2.llama2_tokenizer",
            "path": str(assets / TOKENIZER_NAME),
            "max_seq_len": 64,
        },
        "dataset": _tiny_data(cfg, assets),
        "use_maximum_batch_size": True,
        "adaptive": {"memory_limit": "256MiB", "max_batch_size": 4},
    }
    if "teacher_model" in cfg:
        changes["teacher_model"] = {"_component_": "torchtune.models.llama2.llama2"} | MODEL_GEOMETRY
        changes["teacher_checkpointer"] = checkpointer | {"checkpoint_files": [TEACHER_NAME]}
    if "ref_checkpointer" in cfg:
        changes["ref_checkpointer"] = checkpointer
    if "quantizer" in cfg:
        changes["quantizer"] = dict(cfg.quantizer) | {"groupsize": GROUP_SIZE}  # which divides the tiny model's sizes
    for key in changes:
        cfg.pop(key, None)
    return OmegaConf.merge(cfg, changes)  # pyright: ignore[reportReturnType]


def _tiny_model(cfg_model: DictConfig) -> dict[str, Any]:
    """A Llama of two layers with the config's own LoRA keys."""
    is_lora = "lora_attn_modules" in cfg_model
    taken = inspect.signature(lora_llama2 if is_lora else llama2).parameters
    kept = {str(key): value for key, value in OmegaConf.to_container(cfg_model).items() if key in taken}  # pyright: ignore
    name = str(cfg_model._component_).rpartition(".")[2]
    if is_lora and name.startswith("qlora"):
        kept["quantize_base"] = True
    component = "lora_llama2" if is_lora else "llama2"
    geometry = WIDE if kept.get("quantize_base") else MODEL_GEOMETRY | {"num_layers": 2}
    return kept | geometry | {"_component_": f"torchtune.models.llama2.{component}"}


def _tiny_data(cfg: DictConfig, assets: Path) -> dict[str, Any]:
    is_preference = "rlhf" in str(cfg.loss._component_)
    dataset = {"source": "json", "split": "train"}
    if is_preference:
        return dataset | {
            "_component_": "torchtune.datasets.preference_dataset",
            "data_files": str(assets / PAIRS_NAME),
        }
    return dataset | {
        "_component_": "torchtune.datasets.instruct_dataset",
        "data_files": str(assets / DATA_NAME),
        "packed": bool(cfg.dataset.get("packed", False)),
    }


def document(starts: Sequence[Start], *, seconds: float) -> list[str]:
    """The lines of the result."""
    counted = Counter(one.outcome for one in starts)
    totals = ", ".join(f"{counted[outcome]} {outcome}" for outcome in OUTCOMES)
    rows = [
        (recipe, *(str(sum(one.recipe == recipe and one.outcome == outcome for one in starts)) for outcome in OUTCOMES))
        for recipe in dict.fromkeys(one.recipe for one in starts)
    ]
    others = [one for one in starts if one.outcome != STARTED]
    return [
        "# Stock configs through our recipes, on a tiny model",
        "",
        provenance(COMMAND, ranks="1 or 2 ranks of 1 thread", seconds=seconds),
        "",
        "Model, checkpoint, tokenizer and data are replaced by tiny ones, and quantizers have groups of"
        f" {GROUP_SIZE}; everything else is as it is. A search of up to 4 rows, then {STEPS} steps and a checkpoint.",
        "",
        f"{len(starts)} text configs: {totals}.",
        "",
        *table(["recipe", *OUTCOMES], rows),
        *(
            ["", *table(["config", "outcome", "why"], [(one.name, one.outcome, one.detail) for one in others])]
            if others
            else []
        ),
    ]


if __name__ == "__main__":
    main()

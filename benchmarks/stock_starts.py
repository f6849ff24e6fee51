"""Does every stock config start? Each is run by the adaptive recipe for two steps with a search, on a tiny model.

    OMP_NUM_THREADS=1 python -m benchmarks.stock_starts

Takes every config that torchtune registers for a recipe that has an adaptive version. Model, checkpoint, tokenizer and
data are replaced by tiny ones; everything else stays as it is. Distributed recipes run on two ranks. Writes a table to
``results/stock_starts_cpu.md``. Ends with status 1 if a config neither starts nor is refused.

With ``TEST_DEVICE=cuda``, on a simulated GPU, it takes only the configs that need a GPU, and writes
``results/stock_starts_simulated.md``.
"""

import argparse
import inspect
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune._recipe_registry import get_all_recipes
from torchtune.models.llama2 import llama2, lora_llama2
from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.tables import publish, table
from tests.support import images
from tests.support.ppo_runs import make_reward_model, ppo_config
from tests.support.ranks import DEVICE, RanksFailedError, run_alone, run_on_ranks
from tests.support.recipe_runs import (
    RECIPES,
    TEACHER_NAME,
    RecordingLogger,
    adaptive_recipe,
    finished,
    shallow_assets,
)
from torchtune_adaptive.errors import InputError, reason_of
from torchtune_adaptive.stock.configs import load_config
from torchtune_adaptive.tiny import DATA_NAME, MODEL_GEOMETRY, MODEL_NAME, PAIRS_NAME, TOKENIZER_NAME, make_tiny_assets

_ON_GPU = DEVICE == "cuda"
_MACHINE = "a simulated GPU for each rank" if _ON_GPU else "no GPU"
RESULTS = Path(__file__).parent / "results" / f"stock_starts_{'simulated' if _ON_GPU else 'cpu'}.md"
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.stock_starts"
if _ON_GPU:
    COMMAND = f"TEST_DEVICE=cuda {COMMAND}"
_SIMULATED = {"SIMULATED_GPUS": "2", "SIMULATED_VALUES": "1"}
# Without Triton: layers are traced and run as they are, and packed data have masks instead of flex attention.
_SIMULATED |= {"TORCH_COMPILE_BACKEND": "aot_eager", "SIMULATED_CAPABILITY": "70"}
KINDS = {module.removeprefix("adaptive_"): kind for kind, (module, _) in RECIPES.items()}
PPO = "ppo_full_finetune_single_device"
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
    argparse.ArgumentParser(description=__doc__).parse_args()  # refuses arguments
    started = time.perf_counter()
    if _ON_GPU:
        os.environ |= _SIMULATED
    with tempfile.TemporaryDirectory() as directory:
        make_tiny_assets(Path(directory) / "tiny", num_samples=400)
        assets = shallow_assets(Path(directory) / "tiny")
        torch.save(llama2(**WIDE).state_dict(), assets / WIDE_NAME)
        make_reward_model(assets)
        images.make_assets(assets / "images")
        configs = [(recipe, name) for recipe, name in stock_configs() if needs_gpu(load_config(name)) or not _ON_GPU]
        starts = [start(recipe, name, assets) for recipe, name in tqdm(configs, unit=" configs")]
    _report(starts, seconds=time.perf_counter() - started)
    raise SystemExit(any(one.outcome == FAILED for one in starts))


def stock_configs() -> list[tuple[str, str]]:
    """Recipe and name of all configs that have an adaptive recipe."""
    registered = [(recipe.name, config.name) for recipe in get_all_recipes() for config in recipe.configs]
    return [(recipe, name) for recipe, name in registered if recipe in KINDS or recipe == PPO]


def needs_gpu(cfg: DictConfig) -> bool:
    """Whether torchtune or one of its packages does something of this config on a GPU alone."""
    on_gpu = ("compile", "fsdp_cpu_offload", "enable_activation_offloading")
    return "bitsandbytes" in str(cfg.optimizer._component_) or any(cfg.get(key, False) for key in on_gpu)


def start(recipe: str, name: str, assets: Path) -> Start:
    """Run the config, on two ranks if its recipe is a distributed one."""
    with tempfile.TemporaryDirectory() as output_dir:
        arguments = KINDS.get(recipe, recipe), name, assets, Path(output_dir)
        try:
            if recipe == PPO:
                outcome, detail = run_alone(_start_ppo, *arguments)
            elif recipe.endswith("single_device"):
                outcome, detail = run_alone(_start, 0, *arguments)
            else:
                outcome, detail = run_on_ranks(_start, 2, *arguments)[0]
        except RanksFailedError as error:
            return Start(recipe, name, FAILED, str(error).strip().splitlines()[-1])
    return Start(recipe, name, outcome, detail)


def _start(_: int, kind: str, name: str, assets: Path, output_dir: Path) -> tuple[str, str]:
    cfg = tiny_version(name, assets, output_dir)

    def run() -> str:
        _, _, recipe = finished(adaptive_recipe(kind), cfg)
        assert recipe.trainer.global_step == STEPS
        found = recipe.trainer.sizes.result
        return f"{found.exact_batch_size} of {found.bound}"

    return _outcome(run)


def _start_ppo(_: str, name: str, assets: Path, output_dir: Path) -> tuple[str, str]:
    from torchtune_adaptive.ppo.recipe import AdaptivePPOFullFinetuneRecipeSingleDevice  # its packages take seconds

    stock = load_config(name)
    as_stock = {key: stock[key] for key in ("dtype", "compile", "optimizer", "optimizer_in_bwd")}
    cfg = ppo_config(
        assets,
        output_dir,
        **as_stock,
        device=DEVICE,
        gradient_accumulation_steps=stock.gradient_accumulation_steps,
        use_maximum_batch_size=True,
    )

    def run() -> str:
        recipe = AdaptivePPOFullFinetuneRecipeSingleDevice(cfg)
        recipe.setup(cfg)
        recipe.train()
        recipe.cleanup()
        return f"{recipe._forward_batch_size} of {cfg.batch_size}"

    return _outcome(run)


def _outcome(run: Callable[[], str]) -> tuple[str, str]:
    try:
        return STARTED, run()
    except InputError as error:
        return REFUSED, str(error)
    except Exception as error:
        return FAILED, reason_of(error)


def tiny_version(name: str, assets: Path, output_dir: Path) -> DictConfig:
    """The config with tiny model, checkpoint, tokenizer and data, and with keys that keep the run short."""
    cfg = load_config(name)
    takes_images = "vision" in name
    model = {} if takes_images else _tiny_model(cfg.model)
    checkpointer = {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(assets),
        "checkpoint_files": [WIDE_NAME if model.get("quantize_base") else MODEL_NAME],
        "recipe_checkpoint": None,
        "output_dir": str(output_dir),
        "model_type": "LLAMA2",
    }
    changes: dict[str, Any] = {
        "device": DEVICE,
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
        "dataset": {} if takes_images else _tiny_data(cfg, assets),
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
    if takes_images:
        changes |= _with_images(cfg, assets / "images", checkpointer)
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


def _with_images(cfg: DictConfig, assets: Path, checkpointer: dict[str, Any]) -> dict[str, Any]:
    """Model, tokenizer, data and checkpoint of a config whose model takes images."""
    name = str(cfg.model._component_).rpartition(".")[2]
    kept = {str(key): value for key, value in OmegaConf.to_container(cfg.model).items()}  # pyright: ignore
    for key in ("_component_", "image_size"):
        kept.pop(key, None)
    found = images.config_of("lora" if "lora" in name else "full", assets)
    weights = images.MODEL_NAME
    if "lora" in name:
        for part, how in (("decoder", "frozen"), ("encoder", "lora"), ("fusion", "lora")):
            assert kept.pop(f"{part}_trainable") == how
    if name.startswith("qlora"):
        kept |= {"quantize_base": True, "width": images.WIDE}
        weights = images.WIDE_NAME
    return {
        "model": found["model"] | kept,
        "tokenizer": found["tokenizer"],
        "dataset": found["dataset"] | {"dtype": "bfloat16", "count": 600},
        "checkpointer": checkpointer
        | {"checkpoint_dir": str(assets), "checkpoint_files": [weights], "model_type": "LLAMA3_VISION"},
    }


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


def _report(starts: Sequence[Start], *, seconds: float) -> None:
    counted = Counter(one.outcome for one in starts)
    totals = ", ".join(f"{counted[outcome]} {outcome}" for outcome in OUTCOMES)
    rows = [
        (recipe, *(str(sum(one.recipe == recipe and one.outcome == outcome for one in starts)) for outcome in OUTCOMES))
        for recipe in dict.fromkeys(one.recipe for one in starts)
    ]
    others = [(one.name, one.outcome, one.detail) for one in starts if one.outcome != STARTED]
    publish(
        RESULTS,
        "Stock configs through our recipes, on a tiny model",
        provenance(COMMAND, ranks="1 or 2 ranks of 1 thread", seconds=seconds, device=_MACHINE),
        "Model, checkpoint, tokenizer and data are replaced by tiny ones, and quantizers have groups of"
        f" {GROUP_SIZE}; everything else is as it is. A search of up to 4 rows, then {STEPS} steps and a checkpoint.",
        f"{len(starts)} configs{' that need a GPU' if _ON_GPU else ''}: {totals}.",
        table(["recipe", *OUTCOMES], rows),
        *([table(["config", "outcome", "why"], others)] if others else []),
    )


if __name__ == "__main__":
    main()

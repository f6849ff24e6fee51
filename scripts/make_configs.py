"""Write the ready configs and their table, ``configs/adaptive`` and ``configs/README.md``.

    python -m scripts.make_configs

Every config is complete: it inherits nothing. Comments of our keys come from ``torchtune_adaptive.settings``, and the
figures in the headers from ``benchmarks/results/config_plans.json``, which ``benchmarks/config_plans.py`` writes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scripts.config_table import CONFIGS, FOLDER, TITLES, Config, Model, all_configs
from torchtune_adaptive.settings import CONFIG_KEYS, ConfigKey
from torchtune_adaptive.text import text_table

REPOSITORY = Path(__file__).parent.parent
_NOT_PLANNED = ("search_only", "reuse_found_size")  # keys of `adaptive` that no plan depends on
PLANS = REPOSITORY / "benchmarks" / "results" / "config_plans.json"
DEVICES_GIB = (24, 40, 80)
GIB = 2**30
# What torchtune's own keys do, for those that are often changed.
COMMENTS = {
    "packed": "True: several samples share a row of max_seq_len tokens",
    "max_seq_len": "longer samples are cut; less needs less memory",
    "lora_rank": "more learns more and needs more memory",
    "resume_from_checkpoint": "auto: continue from the latest checkpoint in output_dir, if there is one",
    "save_adapter_weights_only": "True: do not save the merged model",
    "max_steps_per_epoch": "null: the whole data set",
    "clip_grad_norm": "greatest norm of the gradients; null: not clipped",
    "optimizer_in_bwd": "True: less memory, but without global_batch_size and oom_recovery",
    "compile": "True: faster, mostly with less memory",
    "enable_activation_checkpointing": "True: less memory, slower",
    "enable_activation_offloading": "True: less memory, slower; uses host memory",
    "fsdp_cpu_offload": "True: weights, gradients and optimizer state are in host memory",
    "custom_sharded_layers": "sharded apart from the others, because they are large",
}

# ---- the text of a config


def config_text(config: Config, plan: Mapping[str, Any] | None) -> str:
    """The file: a header with the figures of ``plan``, then the keys."""
    header = "\n".join(f"# {line}".rstrip() for line in _header(config, plan))
    return f"{header}\n\n{body(config)}"


def body(config: Config) -> str:
    """The keys, which is all that a run reads."""
    sections = [
        f"output_dir: /tmp/torchtune/{config.full_name}  # /tmp may be deleted by your system",
        _section("Tokenizer", {"tokenizer": {**config.model.tokenizer, "max_seq_len": config.row_tokens}}),
        _data(config),
        _model(config),
        _checkpointer(config),
        _batch(config),
        _training(config),
        _device(config),
        _section(
            "Logging",
            {
                "metric_logger": {
                    "_component_": "torchtune.training.metric_logging.DiskLogger",
                    "log_dir": "${output_dir}/logs",
                },
                "log_every_n_steps": 1,
                "log_peak_memory_stats": True,
            },
        ),
    ]
    if config.method != "lora_dpo":  # torchtune's recipes for it do not profile
        profiler = {
            "_component_": "torchtune.training.setup_torch_profiler",
            "enabled": False,
            "output_dir": "${output_dir}/profiling_outputs",
        }
        sections.append(_section("Profiler", {"profiler": profiler}))
    return "\n\n".join(sections) + "\n"


def digest(config: Config) -> str:
    """A hash that changes with each of the config's values that a plan may depend on, and with its ranks."""
    values: Any = OmegaConf.to_container(OmegaConf.create(body(config)))
    for key in _NOT_PLANNED:
        del values["adaptive"][key]
    for key in [key for key in values if key.endswith("checkpointer")]:
        del values[key]
    return hashlib.sha256(json.dumps([values, config.ranks], sort_keys=True).encode()).hexdigest()[:16]


def adaptive_block(values: Mapping[str, Any]) -> str:
    """The keys of this package with their descriptions; those that ``values`` lacks have their defaults."""
    top = [f"{key.name}: {_text(values.get(key.name, key.default))}  # {key.description}" for key in _keys("")]
    block = [
        f"  {key.name}: {_text(values.get(key.name, key.default))}  # {key.description}" for key in _keys("adaptive")
    ]
    return "\n".join([*top, "adaptive:", *block])


def _keys(block: str) -> list[ConfigKey]:
    return [key for key in CONFIG_KEYS if key.path.rpartition(".")[0] == block]


def _header(config: Config, plan: Mapping[str, Any] | None) -> list[str]:
    teacher = config.teacher
    of = f" from {teacher.title}" if teacher else ""
    on = "one GPU" if config.ranks == 1 else f"{config.ranks} GPUs"
    return [
        f"{config.model.title}: {TITLES[config.method]}{of} on {on}, with the largest batch that fits",
        "",
        "This config assumes that the model has been downloaded:",
        f"  {config.model.download}",
        *([f"  {teacher.download}"] if teacher else []),
        *(
            ["and that bitsandbytes, which has the optimizer, is installed:", "  pip install bitsandbytes"]
            * config.needs_bitsandbytes
        ),
        "",
        "To launch:",
        f"  {config.launch}",
        "",
        "To see beforehand what fits on your GPU (its name, or a size such as 24GiB), without using it:",
        f"  tune-adaptive plan --config {config.full_name} {config.ranks_option}--memory H100",
        "",
        *_forecast(config, plan),
    ]


def _forecast(config: Config, plan: Mapping[str, Any] | None) -> list[str]:
    if plan is None:
        return ["Not planned yet."]
    row = f"pairs of 2 sequences of {config.row_tokens} tokens" if config.prefers else ""
    row = row or f"rows of {config.row_tokens} tokens"
    header = ["GPU", "largest batch", "safe batch", "batch used", "peak"]
    lines = text_table([header, *([f"{size} GiB", *_figures(plan, size)] for size in DEVICES_GIB)]).splitlines()
    each = f" on each of {config.ranks} GPUs" if config.ranks > 1 else ""
    return [
        f"What the plan says for {row}{each}:",
        *(f"  {line}" for line in lines),
        "The safe batch fits even if the plan is too low by its full uncertainty. The batch used is a power of two",
        "and at most a GPU's share of global_batch_size; the peak is what the process needs with it. Where nothing",
        "fits, the peak is that of one row. Forecasts, made without a GPU.",
    ]


def _figures(plan: Mapping[str, Any], size_gib: int) -> list[str]:
    """Largest batch, the safe one, the one used and its peak on a GPU of so much memory."""
    found = plan["gpus"][f"{size_gib}GiB"]
    largest = found["largest_batch_size"]
    peak = f"{found['process_bytes'] / GIB:.1f} GiB"
    if largest == 0:
        return ["none", "-", "-", peak]
    sizes = ["any" if size is None else str(size) for size in (largest, found["certain_batch_size"])]
    return [*sizes, str(found["batch_size"]), peak]


def _largest_and_safe(plan: Mapping[str, Any], size_gib: int) -> str:
    largest, safe, *_ = _figures(plan, size_gib)
    return largest if largest == "none" else f"{largest} ({safe})"


def _data(config: Config) -> str:
    name = "stack_exchange_paired_dataset" if config.prefers else "alpaca_cleaned_dataset"
    dataset: dict[str, Any] = {"_component_": f"torchtune.datasets.{name}"}
    if not config.prefers:
        dataset["packed"] = False
    return _section("Dataset", {"dataset": dataset, "seed": 0, "shuffle": True})


def _model(config: Config) -> str:
    model: dict[str, Any] = {"_component_": config.model.builder.format("" if config.trains_all else "lora_")}
    if not config.trains_all:
        model |= {
            "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": True,
            "lora_rank": config.model.lora_rank,
            "lora_alpha": 2 * config.model.lora_rank,
            "lora_dropout": 0.0,
        }
    if config.method == "qlora":
        model["quantize_base"] = True
    values: dict[str, Any] = {"model": model}
    if config.teacher:
        values["teacher_model"] = {"_component_": config.teacher.builder.format("")}
    if config.method in ("qat_full", "qat_lora"):
        quantizer = "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
        values["quantizer"] = {"_component_": quantizer, "groupsize": 256}
    return _section("Model", values)


def _checkpointer(config: Config) -> str:
    values: dict[str, Any] = {
        "checkpointer": _checkpoint_of(config.model),
        "resume_from_checkpoint": False,
    }
    if not config.trains_all:
        values["save_adapter_weights_only"] = config.model.billions > 30
    if config.method == "full_dpo":
        values["ref_checkpointer"] = _checkpoint_of(config.model)
    if config.teacher:
        values["teacher_checkpointer"] = _checkpoint_of(config.teacher)
    return _section("Checkpoints", values)


def _checkpoint_of(model: Model) -> dict[str, Any]:
    total = f"{model.num_files:05d}"
    files: Any = {"filename_format": model.file_format, "max_filename": total}
    if model.num_files == 1:
        files = ["model.safetensors"]
    elif model.num_files <= 6:  # a list, as in torchtune: only a list can be overridden by another one
        files = [model.file_format.format(f"{number:05d}", total) for number in range(1, model.num_files + 1)]
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": model.folder,
        "checkpoint_files": files,
        "recipe_checkpoint": None,
        "output_dir": "${output_dir}",
        "model_type": model.model_type,
    }


def _batch(config: Config) -> str:
    values = {
        "use_maximum_batch_size": True,
        "global_batch_size": 64,
        "save_every_n_steps": 200,
        "keep_last_n_checkpoints": 1 if config.trains_all and config.model.billions > 20 else 2,
    }
    return "\n".join(
        [
            "# Batch size",
            "batch_size: 1  # rows per GPU and micro-step; the search replaces it",
            "gradient_accumulation_steps: 1  # global_batch_size decides",
            adaptive_block(values),
        ]
    )


def _training(config: Config) -> str:
    rate = config.model.full_lr if config.trains_all else config.model.lora_lr
    optimizer: dict[str, Any] = {"_component_": "torch.optim.AdamW", "lr": rate, "weight_decay": 0.01, "fused": True}
    if config.needs_bitsandbytes:
        optimizer = {"_component_": "bitsandbytes.optim.PagedAdamW8bit", "lr": rate, "weight_decay": 0.01}
    values: dict[str, Any] = {"epochs": 1, "max_steps_per_epoch": None, "optimizer": optimizer}
    if config.method not in ("full", "qat_full"):
        scheduler = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
        values["lr_scheduler"] = {"_component_": scheduler, "num_warmup_steps": 100}
    if config.prefers:
        values["max_steps_per_epoch"] = 1000
        values["loss"] = {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1, "label_smoothing": 0}
    else:
        values["loss"] = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    if config.teacher:
        values["kd_loss"] = {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"}
        values["kd_ratio"] = 0.5
    values["clip_grad_norm"] = None
    if config.method in ("full", "qat_full"):
        values["optimizer_in_bwd"] = False
    return _section("Training", values)


def _device(config: Config) -> str:
    values: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bf16",
        "compile": False,
        "enable_activation_checkpointing": config.model.billions > 2,
        "enable_activation_offloading": False,
    }
    if config.method == "full" and config.ranks > 1:
        if not config.model.is_tied:
            values["custom_sharded_layers"] = ["tok_embeddings", "output"]
        values["fsdp_cpu_offload"] = config.model.billions > 30
    return _section("Device and memory", values)


def _section(title: str, values: Mapping[str, Any]) -> str:
    return "\n".join([f"# {title}", *_lines(values, indent="")])


def _lines(values: Mapping[str, Any], *, indent: str) -> list[str]:
    lines: list[str] = []
    for key, value in values.items():
        comment = f"  # {COMMENTS[key]}" if key in COMMENTS else ""
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_lines(value, indent=f"{indent}  ")]
        elif key == "checkpoint_files":
            lines += [f"{indent}{key}:", *(f"{indent}  - {name}" for name in value)]
        else:
            quoted = f'"{value}"' if key == "max_filename" else _text(value)  # leading zeros
            lines.append(f"{indent}{key}: {quoted}{comment}")
    return lines


def _text(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else str(value)


# ---- all configs


def written_files() -> dict[Path, str]:
    """Every file that this writes, with its text."""
    plans = json.loads(PLANS.read_text())["configs"] if PLANS.exists() else {}
    plans_of = [(config, _present(plans.get(config.full_name), config)) for config in all_configs()]
    files = {config.path: config_text(config, plan) for config, plan in plans_of}
    return files | {CONFIGS / "README.md": _readme(plans_of)}


def _present(plan: Mapping[str, Any] | None, config: Config) -> Mapping[str, Any] | None:
    """The plan, if it is of the config as it is now."""
    return plan if plan is not None and plan["digest"] == digest(config) else None


def _readme(plans_of: Sequence[tuple[Config, Mapping[str, Any] | None]]) -> str:
    rows = [
        [
            f"[`{config.full_name}`]({config.path.relative_to(CONFIGS)})",
            config.model.title + (f", teacher {config.teacher.title}" if config.teacher else ""),
            TITLES[config.method],
            str(config.ranks),
            str(config.row_tokens),
            *(_largest_and_safe(plan, size) if plan else "" for size in DEVICES_GIB),
            f"`{config.launch}`",
        ]
        for config, plan in plans_of
    ]
    header = ["config", "model", "method", "GPUs", "tokens per row"]
    header += [*(f"{size} GiB" for size in DEVICES_GIB), "launch"]
    table = [header, ["---"] * len(header), *rows]
    return README.format(
        num_configs=len(rows), table="\n".join(f"| {' | '.join(cells)} |" for cells in table), folder=FOLDER
    )


README = """\
# Ready configs

{num_configs} configs that search for the largest batch that fits, keep the global batch at 64 samples, survive running
out of memory, and save a checkpoint every 200 steps. Each is complete. Names begin with `{folder}/`, which avoids
clashes with torchtune's. `tiny/full` and `tiny/lora` train a tiny model on a CPU.

The columns *24 GiB* to *80 GiB* have the largest batch per GPU that should fit and, in parentheses, the safe one, which
fits even if the plan is too low by its full uncertainty. *(0)*: one row fits by the plan, but perhaps not in truth.
*none*: not even one row fits. Batches are in rows of so many tokens; with DPO in pairs of two such sequences. These are
forecasts, made without a GPU by `make config-plans`, and kept in `benchmarks/results/config_plans.json` with the
versions that made them. A run measures, and may find another size.

The files and this page are written by `scripts/make_configs.py` (`make configs`), and `tests/test_ready_configs.py`
compares them with the plans. torchtune 0.6.1 has no Qwen 3.

{table}
"""


def main() -> None:
    """Write all files, and remove configs that are no longer among them."""
    files = written_files()
    for path in set((CONFIGS / FOLDER).rglob("*.yaml")) - files.keys():
        path.unlink()
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"{len(files) - 1} configs and their table written to {CONFIGS}")


if __name__ == "__main__":
    main()

"""PPO on a tiny policy and a tiny reward model, in a test's own process."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from tests.support.recipe_runs import RecordingLogger, shallow_assets
from torchtune_adaptive.stock.configs import load_config
from torchtune_adaptive.tiny import DATA_NAME, MODEL_GEOMETRY, MODEL_NAME, TOKENIZER_NAME

STOCK_CONFIG = "mistral/7B_full_ppo_low_memory"
REWARD_NAME = "reward.pt"
ANSWERS, ANSWERS_PER_STEP, PROMPT_TOKENS = 12, 12, 96
# With this limit, of the divisors of 12, 6 answers can be generated at once and not 12; 2 can be trained on, and not 3.
LIMIT_BYTES = 38_000_000
_GEOMETRY = MODEL_GEOMETRY | {"num_layers": 2}


def make_reward_model(directory: Path) -> None:
    """Write a model that gives one score, with weights of the tiny model."""
    weights = torch.load(directory / MODEL_NAME)
    weights["output.weight"] = weights["output.weight"][:1]
    torch.save(weights, directory / REWARD_NAME)


def ppo_assets(tiny_dir: Path) -> Path:
    """Where the shallow assets of ``tiny_dir`` are, with a reward model."""
    directory = shallow_assets(tiny_dir)
    make_reward_model(directory)
    return directory


def logged_steps() -> list[dict[str, float]]:
    """What the last run has logged of each turn, without its speed."""
    return [
        {name: value for name, value in step.items() if "tokens_per_second" not in name}
        for step in RecordingLogger.last.steps
    ]


def ppo_config(assets: Path, output_dir: Path, **overrides: Any) -> DictConfig:
    """The stock config of PPO with tiny models and data; keys of overrides may be dotted with "__"."""
    checkpointer = {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(assets),
        "checkpoint_files": [MODEL_NAME],
        "recipe_checkpoint": None,
        "output_dir": str(output_dir),
        "model_type": "LLAMA2",
    }
    reward = checkpointer | {"checkpoint_files": [REWARD_NAME], "output_dir": str(output_dir / "value")}
    changes: dict[str, Any] = {
        "device": "cpu",
        "dtype": "fp32",
        "compile": False,
        "seed": 0,
        "output_dir": str(output_dir),
        "metric_logger": {"_component_": "tests.support.recipe_runs.RecordingLogger"},
        "tokenizer": {
            "_component_": "torchtune.models.llama2.llama2_tokenizer",
            "path": str(assets / TOKENIZER_NAME),
            "max_seq_len": PROMPT_TOKENS,
        },
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": str(assets / DATA_NAME),
            "column": "output",
            "split": "train[:48]",
            "add_eos": False,
        },
        "policy_model": {"_component_": "torchtune.models.llama2.llama2"} | _GEOMETRY,
        "reward_and_value_model": {
            "_component_": "torchtune.models.llama2._component_builders.llama2_classifier",
            "num_classes": 1,
        }
        | _GEOMETRY,
        "checkpointer": checkpointer,
        "ref_policy_checkpointer": checkpointer,
        "value_checkpointer": reward,
        "reward_checkpointer": reward,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
        "optimizer_in_bwd": False,
        "batch_size": ANSWERS,
        "forward_batch_size": 2,
        "ppo_batch_size": ANSWERS_PER_STEP,
        "gradient_accumulation_steps": 6,
        "num_steps": 2 * ANSWERS,
        "max_generated_tokens": 8,
        "min_response_length": 2,
        "stop_token_ids": [2],
    }
    cfg = load_config(STOCK_CONFIG)
    for key in changes:
        cfg.pop(key, None)
    cfg = OmegaConf.merge(cfg, changes)
    for key, value in overrides.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False, force_add=True)
    assert isinstance(cfg, DictConfig)
    return cfg

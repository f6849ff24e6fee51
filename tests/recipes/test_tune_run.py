"""The stock ``tune run`` finds and runs the recipes from any directory, with configs of this package and stock ones."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.support.checkout import tune_run
from tests.support.ppo_runs import ppo_assets, ppo_config
from tests.support.recipe_runs import RECIPES, SHALLOW, shallow_assets, tiny_config
from tests.support.run_logs import events_in
from torchtune_adaptive.tiny import MODEL_GEOMETRY

SHORT = ["epochs=1", "max_steps_per_epoch=2", "adaptive.memory_limit=128MiB", "tokenizer.max_seq_len=128"]


def on_tiny(kind: str, assets: Path, output_dir: Path) -> list[str]:
    """Overrides that replace a stock config's model, tokenizer, data and checkpoint by the shallow ones."""
    builder = {"full": "llama2", "lora": "lora_llama2"}[kind]
    return [
        "device=cpu",
        "dtype=fp32",
        f"output_dir={output_dir}",
        f"model=torchtune.models.llama2.{builder}",
        *(
            f"model.{name}={value}"
            for name, value in (MODEL_GEOMETRY | {"num_layers": SHALLOW["model__num_layers"]}).items()
        ),
        "tokenizer=torchtune.models.llama2.llama2_tokenizer",
        f"tokenizer.path={assets}/tokenizer.model",
        "dataset=torchtune.datasets.instruct_dataset",
        "dataset.source=json",
        f"dataset.data_files={assets}/docstrings.json",
        "checkpointer=torchtune.training.FullModelTorchTuneCheckpointer",
        f"checkpointer.checkpoint_dir={assets}",
        "checkpointer.checkpoint_files=[model.pt]",
        "checkpointer.model_type=LLAMA2",
        "gradient_accumulation_steps=1",
        *SHORT,
    ]


CONFIGS = ("tiny/full", "tiny/lora", "llama3_2/1B_full", "llama3_2/1B_lora")
IN_EVERY_RUN = [("llama3_2/1B_lora", 2)]  # a stock config on two ranks


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        pytest.param(*case, marks=() if case in IN_EVERY_RUN else pytest.mark.exhaustive)
        for case in [*product(CONFIGS, (1, 2)), ("tiny/full", 0)]
    ],
)
def test_stock_tune_run_searches_and_trains(config: str, ranks: int, tiny_dir: Path, tmp_path: Path) -> None:
    """One rank without torchrun's options, as on a laptop; two with them. Status 0 means that every rank succeeded.

    No ranks: the recipe for a single device.
    """
    kind = "lora" if config.endswith("lora") else "full"
    name = f"adaptive_{kind}_finetune_{'distributed' if ranks else 'single_device'}"
    if config.startswith("tiny/"):
        overrides = [f"tiny_dir={tiny_dir}", f"output_dir={tmp_path / 'out'}", *SHORT]
    else:
        overrides = on_tiny(kind, shallow_assets(tiny_dir), tmp_path / "out")
    launcher = ["--nproc_per_node", str(ranks)] if ranks > 1 else []
    search = ["use_maximum_batch_size=True", "adaptive.max_batch_size=8"]
    run = tune_run(*launcher, name, "--config", config, *search, *overrides, directory=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    (search,), decisions = (events_in(tmp_path / "out", name) for name in ("search", "sizes"))
    assert search["world_size"] == max(ranks, 1)
    assert search["seq_len"] == 128
    assert search["batch_size"] == decisions[0]["batch_size"] >= 4
    assert list((tmp_path / "out" / "epoch_0").iterdir())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [*RECIPES, "ppo"])
def test_stock_tune_run_starts_every_recipe(kind: str, tiny_dir: Path, tmp_path: Path) -> None:
    assets = ppo_assets(tiny_dir) if kind == "ppo" else shallow_assets(tiny_dir)
    search = {"memory_limit": "256MiB", "max_batch_size": 4}
    options: dict[str, Any] = {"use_maximum_batch_size": True, "adaptive": search}
    options["metric_logger"] = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(tmp_path)}
    if kind == "ppo":
        recipe, cfg = "adaptive_ppo_full_finetune_single_device", ppo_config(assets, tmp_path, **options)
    else:
        options |= SHALLOW | {"epochs": 1, "max_steps_per_epoch": 2, "tokenizer__max_seq_len": 64}
        recipe, cfg = RECIPES[kind][0], tiny_config(kind, assets, tmp_path, **options)
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    launcher = [] if recipe.endswith("single_device") else ["--nproc_per_node", "2"]
    run = tune_run(*launcher, recipe, "--config", str(tmp_path / "config.yaml"), directory=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert events_in(tmp_path, "search")
    assert list((tmp_path / "epoch_0").iterdir())


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_thirty_launches_end_with_status_zero_on_every_rank(ranks: int, tiny_dir: Path, tmp_path: Path) -> None:
    """A gloo thread that outlives the interpreter aborts a rank now and then: one clean exit proves nothing."""
    launcher = [] if ranks == 1 else ["--nproc_per_node", str(ranks)]
    statuses = []
    for launch in range(30):
        kind = ("full", "lora")[launch % 2]
        overrides = [f"tiny_dir={tiny_dir}", f"output_dir={tmp_path / 'out'}", "use_maximum_batch_size=True", *SHORT]
        recipe = f"adaptive_{kind}_finetune_distributed"
        run = tune_run(*launcher, recipe, "--config", f"tiny/{kind}", *overrides, directory=tmp_path)
        statuses.append(run.returncode)
    print(f"{ranks} ranks: {statuses.count(0)} of {len(statuses)} launches ended with status 0")
    assert statuses == [0] * 30

"""Models of texts and images do what each recipe can do with texts: parity, search, growth, recovery, resume."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.test_methods import check_parity, check_recovery, check_resume, check_search
from tests.support import images
from tests.support.method_runs import STRATEGIES, Trials, by_rank
from tests.support.ranks import run_alone
from tests.support.recipe_runs import adaptive_recipe, finished, set_up, tiny_config, without_saving
from torchtune_adaptive.errors import InputError

ALL_KINDS = ("full", "lora", "full_single", "lora_single")
KINDS = [kind if kind == "lora" else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ALL_KINDS]
WITH_TEXTS = (2, 0, 1, 0, 0, 1)  # images of each sample; with one row in a micro-batch, ranks get texts alone
TWO, ONE_OR_NONE = (2,), (1, 0, 1, 1, 0, 0)  # with these all steps have the same operations
COLLATE = "torchtune.data.padded_collate_tiled_images_and_mask"


def collate_four_tiles(*args: Any, **kwargs: Any) -> Any:
    """A function that a config can name: every image has as many tiles as there can be."""
    from torchtune.data import padded_collate_tiled_images_and_mask

    return padded_collate_tiled_images_and_mask(*args, pad_max_tiles=images.MAX_TILES, **kwargs)


def _trials(kind: str, tiny_dir: Path, assets: Path, output_dir: Path, **more: Any) -> Trials:
    return Trials(kind, tiny_dir, output_dir, **images.config_of(kind, assets), **more)


def _own_trials(*places: Any) -> dict[str, Any]:
    """What depends on the images of rows."""
    with_texts = _trials(*places, dataset__images=WITH_TEXTS)
    return {"parity": _trials(*places).parity(1), "recovery": with_texts.recovery(points=2)}


def _exhaustive_trials(*places: Any) -> dict[str, Any]:
    trials = _trials(*places, enable_activation_checkpointing=True, dataset__count=96)
    for_forty_steps = {"dataset__count": 160}  # per epoch, on two ranks
    return {
        "parity": trials.parity(2),
        "search": trials.search(),
        "growth": _trials(*places, dataset__images=WITH_TEXTS).growth(),
        "recovery": _trials(*places, dataset__images=TWO, **for_forty_steps).recovery(points=None),
        "recovery with checkpointing": _trials(
            *places, enable_activation_checkpointing=True, dataset__images=ONE_OR_NONE, **for_forty_steps
        ).recovery(points=None),
        "resume": _trials(*places, dataset__images=WITH_TEXTS).resume(within_epoch=True),
    }


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images.make_assets(tmp_path_factory.mktemp("images") / "assets")


@pytest.fixture(scope="module")
def outcomes(tiny_dir: Path, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a kind to the outcomes of its trials, which are run once."""
    return functools.cache(lambda kind: by_rank(_own_trials, kind, tiny_dir, assets, tmp_path_factory.mktemp(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_parity(kind: str, outcomes: Any) -> None:
    check_parity(kind, [rank["parity"] for rank in outcomes(kind)], accumulation=1)


@pytest.mark.parametrize("kind", KINDS)
def test_recovery(kind: str, outcomes: Any) -> None:
    check_recovery([rank["recovery"] for rank in outcomes(kind)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_strategy_and_every_seventh_operation(kind: str, tiny_dir: Path, assets: Path, tmp_path: Path) -> None:
    ranks = by_rank(_exhaustive_trials, kind, tiny_dir, assets, tmp_path, timeout_s=7200)
    check_parity(kind, [rank["parity"] for rank in ranks], accumulation=2)
    check_search([rank["search"] for rank in ranks], strategies=STRATEGIES)
    assert ranks[0]["growth"] == [2, 4, 6]
    for name in ("recovery", "recovery with checkpointing"):
        check_recovery([rank[name] for rank in ranks])
        print(f"{kind}, {name}: {ranks[0][name]['struck']} faults, and as many right results")
    check_resume([rank["resume"] for rank in ranks], steps_left=2)


# ---- the cut of a step


def _losses(tiny_dir: Path, assets: Path, output_dir: Path, collate: str) -> list[list[float]]:
    """Of a global batch of eight samples, at once and in quarters."""
    found = []
    for rows in (8, 2):
        settings: dict[str, Any] = {"memory_limit": None, "global_batch_size": 8, "oom_recovery": False}
        common = {"collate_fn": collate, "dataset__images": [1], "max_steps_per_epoch": 1, "epochs": 1}
        cfg = tiny_config(
            "full_single",
            tiny_dir,
            output_dir / str(rows),
            **images.config_of("full", assets) | common | {"model__num_layers": 2},
            batch_size=rows,
            adaptive=settings,
        )
        steps, _, _ = finished(without_saving(adaptive_recipe("full_single")), cfg)
        found.append([step["loss"] for step in steps])
    return found


def test_the_cut_does_not_change_the_losses(tiny_dir: Path, assets: Path, tmp_path: Path) -> None:
    whole, cut = run_alone(_losses, tiny_dir, assets, tmp_path, f"{__name__}.collate_four_tiles")
    assert cut == pytest.approx(whole, rel=2e-6)


@pytest.mark.exhaustive
def test_the_cut_shows_where_torchtune_pads_images_to_different_numbers_of_tiles(
    tiny_dir: Path, assets: Path, tmp_path: Path
) -> None:
    """The encoder attends to padding, so torchtune's result depends on a sample's micro-batch."""
    whole, cut = run_alone(_losses, tiny_dir, assets, tmp_path, COLLATE)
    assert cut == pytest.approx(whole, rel=2e-3)
    assert cut != pytest.approx(whole, rel=2e-6)


# ---- what is refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"adaptive__max_tokens_per_micro_batch": 4096},
            "`max_tokens_per_micro_batch: 4096` cannot be used with images, whose memory follows not only tokens.",
        ),
        (
            {"tokenizer__max_seq_len": 8192, "use_maximum_batch_size": True},
            "Rows have 8192 tokens, but the model takes at most 256; set `tokenizer.max_seq_len` to 256 or less.",
        ),
    ],
)
def test_a_token_budget_and_rows_longer_than_the_decoder_takes_are_refused(
    overrides: dict[str, Any], sentence: str, tiny_dir: Path, assets: Path, tmp_path: Path
) -> None:
    cfg = tiny_config("full_single", tiny_dir, tmp_path, **images.config_of("full", assets) | overrides)
    with pytest.raises(InputError) as refused:
        set_up(adaptive_recipe("full_single"), cfg)
    assert str(refused.value) == sentence

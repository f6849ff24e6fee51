"""The table of what each recipe supports, built from the tests that show it.

    python -m tests.support.recipe_table

writes it into ``docs/recipes.md``, between its two marker lines.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from omegaconf import OmegaConf

from benchmarks.support.ppo_runs import STOCK_CONFIG
from benchmarks.support.recipe_runs import RECIPES, adaptive_recipe, stock_recipe
from tests.plan import test_plan_methods
from tests.ppo import test_ppo, test_ppo_checkpoints
from tests.recipes import test_methods
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.ppo import recipe as ppo
from torchtune_adaptive.stock.configs import load_config, method_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"
BEGIN, END = "<!-- what the tests show: python -m tests.support.recipe_table -->", "<!-- end -->"
GROWTH = {"_component_": "torchtune_adaptive.schedule.linear", "increment": 2}
# Column, and the tests that show it.
FEATURES: dict[str, list[Callable[..., Any]]] = {
    "as in torchtune": [test_methods.test_parity],
    "search": [test_methods.test_search, test_methods.test_search_in_backward],
    "growth": [test_methods.test_growth, test_methods.test_growth_in_backward],
    "recovery": [test_methods.test_recovery],
    "resume": [test_methods.test_resume],
    "global batch, token budget": [test_methods.test_global_batch],
    "plan": [test_plan_methods.test_every_phase_of_a_step_needs_what_was_planned_to_the_byte],
    "compile": [test_methods.test_compile],
}

PPO_TESTS: dict[str, list[Callable[..., Any]]] = {
    "as in torchtune": [
        test_ppo.test_a_search_restores_all_state_and_training_equals_the_stock_recipe_with_those_sizes
    ],
    "search": [
        test_ppo.test_a_search_finds_what_torchtunes_own_loop_fits,
        test_ppo.test_optimizers_that_step_in_backward_are_restored_and_need_a_step_that_fits_at_once,
    ],
    "resume": [test_ppo_checkpoints.test_a_resumed_run_equals_an_uninterrupted_one],
}


def table() -> str:
    """The table in Markdown, one row for each recipe, with its footnotes and the tests behind it."""
    rows = [["recipe", *FEATURES, "`optimizer_in_bwd`"], ["---"] * (len(FEATURES) + 2)]
    for kind, (module, _) in RECIPES.items():
        cells = {
            name: "yes" if any(kind in kinds_of(test) for test in tests) else "" for name, tests in FEATURES.items()
        }
        cells["compile"] = cells["compile"] or compiled(kind)
        rows.append([f"`{module}`", *cells.values(), in_backward(kind)])
    rows.append(row_of_ppo())
    notes: dict[str, int] = {}
    lines = ["| " + " | ".join(with_note(cell, notes) for cell in row) + " |" for row in rows]
    lines += ["", *(f"{number}. {sentence}" for sentence, number in notes.items())]
    tests = FEATURES | {"PPO": [test for tests in PPO_TESTS.values() for test in tests]}
    lines += ["", "The tests:", "", *(f"- {name}: {named(*tests[name])}" for name in tests)]
    return "\n".join(lines)


def with_note(cell: str, notes: dict[str, int]) -> str:
    """``cell``, with the number of its reason in ``notes`` instead of the reason itself."""
    verdict, _, reason = cell.partition(": ")
    return f"{verdict} ({notes.setdefault(reason, len(notes) + 1)})" if reason else cell


def row_of_ppo() -> list[str]:
    """The row of PPO, which trains with torchtune's own loop."""
    recipe: Any = ppo.AdaptivePPOFullFinetuneRecipeSingleDevice
    cfg = load_config(STOCK_CONFIG, ["optimizer_in_bwd=False"])

    def refused(keys: dict[str, Any]) -> str:
        return refusal(lambda: recipe(OmegaConf.merge(cfg, keys)))

    cells = {
        "growth": refused({"batch_increase_function": GROWTH}),
        "recovery": f"no: {ppo.WHY_UNRECOVERABLE}.",
        "global batch, token budget": refused({"adaptive": {"global_batch_size": 8}}),
        "plan": refusal(lambda: method_of(cfg)),
        "compile": "not tested",
    } | dict.fromkeys(PPO_TESTS, "yes")
    return [
        "`adaptive_ppo_full_finetune_single_device`",
        *(cells.get(feature, "") for feature in FEATURES),
        "searched, not recovered",
    ]


def named(*tests: Callable[..., Any]) -> str:
    """The names of ``tests``."""
    return ", ".join(f"`{test.__name__}`" for test in tests)


def refusal(action: Callable[[], Any]) -> str:
    """The sentence with which ``action`` is refused."""
    with pytest.raises(InputError) as refused:
        action()
    return f"refused: {refused.value}"


def kinds_of(test: Callable[..., Any]) -> list[str]:
    """The kinds of recipes that ``test`` is run with."""
    marks = [mark for mark in vars(test).get("pytestmark", []) if mark.name == "parametrize"]
    cases = next(cases for names, cases in (mark.args for mark in marks) if "kind" in names)
    values = [getattr(case, "values", case) for case in cases]  # the values of a `pytest.param`
    return [value if isinstance(value, str) else value[0] for value in values]


def in_backward(kind: str) -> str:
    """The cell for ``optimizer_in_bwd`` with a search: tested, or why not."""
    if kind in kinds_of(test_methods.test_search_in_backward):
        return "searched, not recovered"
    if "optimizer_in_bwd" not in Path(stock_recipe(kind).setup.__code__.co_filename).read_text():
        return "no such key"
    return refused_keys(kind, {"optimizer_in_bwd": True})


def compiled(kind: str) -> str:
    """Why a recipe refuses ``compile``."""
    sentence = refused_keys(kind, {"device": "cpu", "dtype": "fp32", "compile": True})
    by_torchtune = "Compile is not yet supported for QAT"
    return (
        "refused: As in torchtune, which does not support `compile` for QAT." if by_torchtune in sentence else sentence
    )


def refused_keys(kind: str, keys: dict[str, Any]) -> str:
    """The sentence with which a recipe refuses a config of ``keys`` and the keys that it reads first."""
    with TemporaryDirectory() as directory:
        cfg = OmegaConf.create({"epochs": 1, "output_dir": directory, "checkpointer": {}} | keys)
        return refusal(lambda: adaptive_recipe(kind)(cfg))


def main() -> None:
    """Write the table into the document."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()

"""The table of what each recipe can do, put together from the tests that show it.

    python -m tests.recipe_table

writes it into ``docs/recipes.md``, between the two lines that mark its place.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests import test_methods, test_plan_methods
from tests.recipe_runs import RECIPES, adaptive_recipe, stock_recipe
from torchtune_adaptive.errors import InputError

DOCUMENT = Path(__file__).parent.parent / "docs" / "recipes.md"
BEGIN, END = "<!-- what the tests show: python -m tests.recipe_table -->", "<!-- end -->"
# Column, and the tests that show it.
FEATURES: dict[str, list[Callable[..., Any]]] = {
    "as stock": [test_methods.test_parity],
    "search, no trace": [test_methods.test_search, test_methods.test_search_in_backward],
    "growth": [test_methods.test_growth, test_methods.test_growth_in_backward],
    "recovery": [test_methods.test_recovery],
    "resume": [test_methods.test_resume],
    "global batch, token budget": [test_methods.test_global_batch],
    "plan": [test_plan_methods.test_every_phase_of_a_step_needs_what_was_planned_to_the_byte],
}


def table() -> str:
    """The table in Markdown, one row for each recipe."""
    rows = [["recipe", *FEATURES, "`optimizer_in_bwd`"], ["---"] * (len(FEATURES) + 2)]
    for kind, (module, _) in RECIPES.items():
        shown = [
            " ".join(f"`{test.__name__}`" for test in tests if kind in kinds_of(test)) for tests in FEATURES.values()
        ]
        rows.append([f"`{module}`", *shown, in_backward(kind)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def kinds_of(test: Callable[..., Any]) -> list[str]:
    """The kinds of recipes that ``test`` is run with."""
    marks = [mark for mark in vars(test).get("pytestmark", []) if mark.name == "parametrize"]
    cases = next(cases for names, cases in (mark.args for mark in marks) if "kind" in names)
    values = [getattr(case, "values", case) for case in cases]  # of a `pytest.param` its values
    return [value if isinstance(value, str) else value[0] for value in values]


def in_backward(kind: str) -> str:
    """What comes of ``optimizer_in_bwd`` with a search: a test, or why it is none."""
    if kind in kinds_of(test_methods.test_search_in_backward):
        return "searched, not recovered"
    if "optimizer_in_bwd" not in Path(stock_recipe(kind).setup.__code__.co_filename).read_text():
        return "not a key of stock's"
    with pytest.raises(InputError) as refused:
        adaptive_recipe(kind)(OmegaConf.create({"optimizer_in_bwd": True}))
    return f"refused: {refused.value}"


def main() -> None:
    """Write the table into the document."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()

"""The documented table of what each recipe can do agrees with the tests."""

from tests.support import recipe_table
from tests.support.documents import REPOSITORY


def test_the_documented_table_is_that_of_the_tests() -> None:
    document = recipe_table.DOCUMENT.read_text()
    shown = document.partition(recipe_table.BEGIN)[2].partition(recipe_table.END)[0]
    assert shown.strip() == recipe_table.table(), "run `python -m tests.support.recipe_table`"


def test_the_readme_has_the_number_of_recipes() -> None:
    assert len(list((REPOSITORY / "recipes").glob("adaptive_*.py"))) == 12
    assert "**[Twelve recipes](docs/recipes.md)**" in (REPOSITORY / "README.md").read_text()

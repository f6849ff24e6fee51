"""The documented table of what each recipe can do agrees with the tests."""

from tests.support import recipe_table


def test_the_documented_table_is_that_of_the_tests() -> None:
    document = recipe_table.DOCUMENT.read_text()
    shown = document.partition(recipe_table.BEGIN)[2].partition(recipe_table.END)[0]
    assert shown.strip() == recipe_table.table(), "run `python -m tests.support.recipe_table`"

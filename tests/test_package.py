"""The package is typed, its recipes are importable as the wheel maps them, and no file is tracked that a run wrote."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def test_no_file_is_tracked_that_a_run_wrote() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git repository")
    paths = {Path(line) for line in listed.stdout.splitlines()}
    assert {path for path in paths if path.suffix in {".zip", ".pt", ".pickle", ".safetensors", ".gz", ".whl"}} == set()


def test_the_package_is_typed() -> None:
    spec = importlib.util.find_spec("torchtune_adaptive")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    assert any((Path(location) / "py.typed").is_file() for location in spec.submodule_search_locations)


@pytest.mark.parametrize("recipe", sorted((REPOSITORY / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_is_a_top_level_module(recipe: Path) -> None:
    spec = importlib.util.find_spec(recipe.stem)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == recipe

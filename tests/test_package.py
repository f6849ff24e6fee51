"""What is packed, what it needs, and where the project's facts stand more than once."""

import ast
import importlib.util
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import torchtune_adaptive
from tests.support.checkout import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it  # pyright: ignore[reportMissingImports]

FACTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = FACTS["project"]
CHECKS = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "checks.yml").read_text())
MATRIX = CHECKS["jobs"]["suite"]["strategy"]["matrix"]
PACKAGES = {"PIL": "pillow", "yaml": "pyyaml"}  # that are imported by another name


def files(*options: str) -> set[str]:
    """The files that git lists; by default those that it does not ignore."""
    command = ["git", "ls-files", *(options or ("--cached", "--others", "--exclude-standard"))]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git repository")
    return {path for path in listed.stdout.splitlines() if (REPOSITORY / path).exists()}


def test_no_file_is_tracked_that_a_run_wrote() -> None:
    suffixes = {".zip", ".pt", ".pickle", ".safetensors", ".gz", ".whl"}
    assert {path for path in files("--cached") if Path(path).suffix in suffixes} == set()


@pytest.mark.parametrize("recipe", sorted((REPOSITORY / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_a_recipe_is_a_top_level_module(recipe: Path) -> None:
    spec = importlib.util.find_spec(recipe.stem)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == recipe


# ---- what is packed


def packed_by(builder: type[WheelBuilder | SdistBuilder]) -> set[str]:
    """The files in a distribution, but for those that hatchling writes itself."""
    return {file.distribution_path for file in builder(str(REPOSITORY)).recurse_included_files()}


def test_the_wheel_has_the_package_the_recipes_and_the_configs_and_nothing_else() -> None:
    wanted = set()
    for path in files():
        folder, _, rest = path.partition("/")
        if folder == "torchtune_adaptive":
            wanted.add(path)
        elif folder == "recipes":
            wanted.add(rest)
        elif folder == "configs":
            wanted.add(f"torchtune_adaptive/configs/{rest}")
    assert packed_by(WheelBuilder) == wanted


def test_the_source_distribution_has_all_but_hidden_files() -> None:
    assert packed_by(SdistBuilder) == {path for path in files() if not path.startswith(".")}


def test_the_readme_of_the_index_needs_no_repository() -> None:
    metadata = ProjectMetadata(str(REPOSITORY), PluginManager()).core
    targets = re.findall(r"\]\((.*?)\)", metadata.readme)
    assert len(targets) > 10
    home = f"{PROJECT['urls']['Homepage'].replace('github.com', 'raw.githubusercontent.com')}/v{metadata.version}/"
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", metadata.readme)
    assert all(picture.startswith(home) and (REPOSITORY / picture.removeprefix(home)).exists() for picture in pictures)
    pages = f"{PROJECT['urls']['Homepage']}/blob/v{metadata.version}/"
    for target in targets:
        assert target.startswith(("https://", "#")), target
        if target.startswith(pages):
            assert (REPOSITORY / target.removeprefix(pages).partition("#")[0]).exists(), target
    assert re.findall(r"pip install \S+", metadata.readme) == [
        "pip install 'torchtune-adaptive[torchtune]'",
        "pip install 'torchtune-adaptive[transformers]'",
        "pip install torchtune-adaptive`.",
    ]


def imported(folder: Path) -> Iterator[tuple[str, str]]:
    """The top-level modules that files below ``folder`` import, each with the file."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[Any] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
                names = [one.value for one in node.args if isinstance(one, ast.Constant)]
            yield from ((name.partition(".")[0], str(path.relative_to(REPOSITORY))) for name in names)


def test_every_package_that_is_imported_is_declared() -> None:
    requirements = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    declared = {canonicalize_name(Requirement(one).name) for one in requirements}
    own = {"torchtune_adaptive", *(path.stem for path in (REPOSITORY / "recipes").glob("*.py"))}
    modules = [*imported(REPOSITORY / "torchtune_adaptive"), *imported(REPOSITORY / "recipes")]
    if_installed = {"bitsandbytes"}  # which others import
    others = {(name, path) for name, path in modules if name not in sys.stdlib_module_names | own | if_installed}
    assert {name for name, _ in others} >= {"torch", "torchtune", "omegaconf", "matplotlib"}
    assert {
        (name, path) for name, path in others if canonicalize_name(PACKAGES.get(name, name)) not in declared
    } == set()


# ---- facts that stand more than once


def test_the_home_of_the_project_is_the_same_everywhere() -> None:
    urls = PROJECT["urls"]
    site = (REPOSITORY / "mkdocs.yml").read_text()
    assert f"\nrepo_url: {urls['Homepage']}\n" in site
    assert f"\nsite_url: {urls['Documentation']}\n" in site
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert (citation["repository-code"], citation["url"]) == (urls["Homepage"], urls["Documentation"])
    substitutions = FACTS["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    name = urls["Homepage"].removeprefix("https://github.com/")
    assert all(f"/{name}/" in one["replacement"] for one in substitutions if "https://" in one["replacement"])


def test_the_version_is_the_one_of_the_changelog_and_the_citation() -> None:
    newest = re.search(
        r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert newest is not None
    assert newest.groups() == (torchtune_adaptive.__version__, citation["date-released"])
    assert str(citation["version"]) == torchtune_adaptive.__version__


def test_the_versions_that_are_claimed_are_those_that_are_tested() -> None:
    pythons, torches = MATRIX["python"], MATRIX["torch"]
    claim = f"with Python {pythons[0]} to {pythons[-1]} and torch {torches[0]} to {torches[-1]}."
    assert claim in (REPOSITORY / "README.md").read_text()
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert named == pythons
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert PROJECT["dependencies"] == [f"torch>={torches[0]}"]
    major, minor = map(int, torches[-1].split("."))
    assert f"torch<{major}.{minor + 1}" in PROJECT["optional-dependencies"]["torchtune"]
    release = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "release.yml").read_text())
    assert release["jobs"]["smoke"]["strategy"]["matrix"]["python"] == pythons

"""The site builds without a warning and loads nothing from other sites; generated pages match the package."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from omegaconf import OmegaConf

from scripts import reference
from torchtune_adaptive.settings import CONFIG_KEYS

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a warning ends the build."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(folder))
    assert config.strict
    build(config)
    return folder


def test_the_site_has_every_document_and_what_they_link_to(site: Path) -> None:
    documents = {path.relative_to(REPOSITORY / "docs") for path in (REPOSITORY / "docs").rglob("*.md")}
    pages = {path.relative_to(site) for path in site.rglob("*.html")}
    assert {path.with_suffix(".html") for path in documents} <= pages
    elsewhere = {"index", "CONTRIBUTING", "benchmarks/results/search_cpu", "examples/index", "examples/fsdp2_loop.py"}
    assert {Path(f"{name}.html") for name in elsewhere} <= pages
    assert 'href="benchmarks/results/checkpoints_cpu.html"' in (site / "checkpoints.html").read_text()
    assert "RecoverableStep" in (site / "examples" / "fsdp2_loop.py.html").read_text()


def test_a_page_of_the_site_loads_nothing_from_other_sites(site: Path) -> None:
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(https?:|//)[^>]*>")
    assert [found[0] for page in site.rglob("*.html") for found in loaded.finditer(page.read_text())] == []


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.name)
def test_a_generated_page_matches_the_package(page: Path) -> None:
    assert page.read_text() == reference.PAGES[page](), "run `make reference`"


def test_an_example_of_a_key_sets_that_key_to_another_value_than_its_default() -> None:
    for key in CONFIG_KEYS:
        example = OmegaConf.from_dotlist(reference.EXAMPLES[key.path].split())
        assert OmegaConf.select(example, key.path) not in (None, key.default)
    assert set(reference.EXAMPLES) == {key.path for key in CONFIG_KEYS}


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("use_maximum_batch_size", "True or False"),
        ("adaptive.margin", "in [0, 1)"),
        ("adaptive.max_batch_size", "an integer, at least 1, or null"),
        ("adaptive.objective", "memory, throughput"),
    ],
)
def test_the_reference_names_the_allowed_values_of_a_key(path: str, values: str) -> None:
    assert reference.allowed(next(key for key in CONFIG_KEYS if key.path == path)) == values


@pytest.mark.parametrize("module", ["scripts.reference", "scripts.site_pages", "tests.document_commands"])
def test_examples_in_docstrings_of_the_scripts_are_right(module: str) -> None:
    ran = doctest.testmod(importlib.import_module(module))
    assert (ran.attempted > 0, ran.failed) == (True, 0)

"""The site builds without a warning and loads nothing from other sites; the reference matches the package."""

import re
import sys
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from scripts import reference
from tests.support.checkout import REPOSITORY


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a warning ends the build."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(folder))
    assert config.strict
    build(config)
    return folder


@pytest.mark.slow
def test_the_site_has_every_document_and_what_they_link_to(site: Path) -> None:
    documents = {path.relative_to(REPOSITORY / "docs") for path in (REPOSITORY / "docs").rglob("*.md")}
    pages = {path.relative_to(site) for path in site.rglob("*.html")}
    assert {path.with_suffix(".html") for path in documents} <= pages
    elsewhere = {"index", "CONTRIBUTING", "benchmarks/results/search_cpu", "examples/index", "examples/trl_sft.py"}
    assert {Path(f"{name}.html") for name in elsewhere} <= pages
    assert 'href="benchmarks/results/checkpoints_cpu.html"' in (site / "checkpoints.html").read_text()
    assert "AdaptiveSFTTrainer" in (site / "examples" / "trl_sft.py.html").read_text()


@pytest.mark.slow
def test_a_page_of_the_site_loads_nothing_from_other_sites(site: Path) -> None:
    loaded = re.compile(r"<(?:script|link(?! rel=\"canonical)|img|iframe)\b[^>]*\b(?:src|href)=\"?(https?:|//)[^>]*>")
    assert [found[0] for page in site.rglob("*.html") for found in loaded.finditer(page.read_text())] == []
    assert 'data-md-component="source"' not in (site / "index.html").read_text()  # whose script asks the code host


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse writes its help in another way")
def test_the_generated_parts_of_the_reference_are_those_of_the_package() -> None:
    page = reference.PAGE.read_text()
    assert page == reference.with_parts(page), "run `make reference`"

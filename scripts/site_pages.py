"""A hook of mkdocs that makes links between files of the repository work on the site too.

Documents link to each other, to results, examples and configs as files of the repository, so that the links work on
a code host. The pages of the site are those in ``docs/``. Every other file that a page or the navigation names is added
to the site under its own path: Markdown as a page, text as a page that shows it, anything else as it is. Without
``docs/index.md`` the README is the home page.
"""

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
_SHOWN_AS = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".txt": "", "": ""}
_CODE = re.compile(r"(^(?P<fence> *`{3,}).*?^(?P=fence) *$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"""(?P<before>\]\(|\b(?:src|href)=")(?P<target>[^)\s"]+)""")


def with_links(text: str, change: Callable[[str], str]) -> str:
    """The Markdown ``text`` with every link's target changed; code has no links.

    >>> with_links("[a](b) and `[c](d)`", str.upper)
    '[a](B) and `[c](d)`'
    """
    parts, place = [], 0
    for code in _CODE.finditer(text):
        parts += [_LINK.sub(lambda link: link["before"] + change(link["target"]), text[place : code.start()]), code[0]]
        place = code.end()
    return "".join(parts) + _LINK.sub(lambda link: link["before"] + change(link["target"]), text[place:])


def link_targets(text: str) -> list[str]:
    """The targets of all links in the Markdown ``text``.

    >>> link_targets("[a](b.md#c) and [d](https://e)")
    ['b.md#c', 'https://e']
    """
    targets: list[str] = []
    with_links(text, lambda target: targets.append(target) or target)
    return targets


def file_linked(document: str, target: str) -> str | None:
    """The file of the repository that ``target`` in ``document`` links to; None if it is not one.

    A folder means the README in it.

    >>> file_linked("docs/design.md", "../README.md#install"), file_linked("docs/design.md", "https://pytorch.org")
    ('README.md', None)
    """
    parts = urlsplit(target)
    if parts.scheme or parts.netloc or not parts.path:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), parts.path))
    path = f"{path}/README.md" if (REPOSITORY / path).is_dir() else path
    return path if (REPOSITORY / path).is_file() and not path.startswith("..") else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add files outside ``docs/`` that the navigation or a link names."""
    in_nav = [_source(uri) for uri in _uris(config.nav)]
    pending = [*in_nav, *(_source(file.src_uri) for file in files.documentation_pages())]
    seen = set(pending)
    while pending:
        source = pending.pop()
        if not (REPOSITORY / source).is_file():
            continue  # mkdocs itself reports it
        if files.get_file_from_path(_site_uri(source)) is None:
            files.append(
                _added(source, config, InclusionLevel.UNDEFINED if source in in_nav else InclusionLevel.NOT_IN_NAV)
            )
        if source.endswith(".md"):
            linked = {file_linked(source, target) for target in link_targets((REPOSITORY / source).read_text())}
            pending += sorted(path for path in linked - seen if path is not None)
            seen |= set(pending)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point the links of a page at the pages of the site."""
    if page.file.abs_src_path is None:
        return markdown  # the page shows a text file
    document = Path(page.file.abs_src_path).relative_to(REPOSITORY).as_posix()

    def on_site(target: str) -> str:
        linked = file_linked(document, target)
        if linked is None:
            return target
        start = posixpath.dirname(page.file.src_uri)
        return urlsplit(target)._replace(path=posixpath.relpath(_site_uri(linked), start or ".")).geturl()

    return with_links(markdown, on_site)


def _uris(nav: Any) -> Iterator[str]:
    """The paths in a navigation of mkdocs: nested lists, and dictionaries of one title each."""
    if isinstance(nav, str):
        yield nav
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _uris(entry)


def _site_uri(source: str) -> str:
    """Where a file of the repository lies among the sources of the site."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if source == "README.md":
        return "index.md"
    return f"{source}.md" if Path(source).suffix in _SHOWN_AS else source


def _source(site_uri: str) -> str:
    """The file of the repository that lies at ``site_uri`` among the sources of the site."""
    if (REPOSITORY / "docs" / site_uri).is_file():
        return f"docs/{site_uri}"
    return "README.md" if site_uri == "index.md" else site_uri


def _added(source: str, config: MkDocsConfig, inclusion: InclusionLevel) -> File:
    path = REPOSITORY / source
    if path.suffix not in _SHOWN_AS:
        return File.generated(config, _site_uri(source), abs_src_path=str(path), inclusion=inclusion)
    text = path.read_text().rstrip("\n")
    content = f"# {source}\n\n``````{_SHOWN_AS[path.suffix]}\n{text}\n``````\n"
    return File.generated(config, _site_uri(source), content=content, inclusion=inclusion)


def on_post_page(output: str, **_: Any) -> str:
    """The page without the mark at which the theme's script asks the code host for numbers of stars and forks."""
    return output.replace(' data-md-component="source"', "")

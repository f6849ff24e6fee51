"""The report as one page that loads nothing and needs no script."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from torchtune_adaptive.report.pictures import BLUE, INK, LINE, NARROW_INCHES, PAPER, SOFT, WIDE_INCHES, Picture
from torchtune_adaptive.report.story import Section

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --blue: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9da7b3; --line: #3d444d; --paper: #14181d; --blue: #56b4e9; }
}
body { margin: 0 auto; padding: 24px 20px 48px; max-width: 1000px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif; }
h1 { font-size: 24px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 8px; }
ul { margin: 8px 0; padding-left: 20px; }
li { overflow-wrap: anywhere; }
pre { overflow-x: auto; padding: 12px; border: 1px solid var(--line); border-radius: 6px; font-size: 12px; }
figure { margin: 12px 0; }
svg { display: block; width: 100%; height: auto; }
.narrow { display: none; }
@media (max-width: 640px) { .wide { display: none; } .narrow { display: block; } }
"""
_COLOURS = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)", PAPER: "var(--paper)", BLUE: "var(--blue)"}


def page(output_dir: Path, sections: Sequence[Section], pictures: Sequence[Picture]) -> str:
    """The page as HTML, with the pictures first."""
    title = f"Run in {output_dir}"
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
        *(_figure(picture) for picture in pictures),
        *(_section(section) for section in sections),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _figure(picture: Picture) -> str:
    wide = _inline(picture.svg(WIDE_INCHES), f"{picture.name}-wide-")
    narrow = _inline(picture.svg(NARROW_INCHES), f"{picture.name}-narrow-")
    return (
        f'<h2>{escape(picture.title)}</h2>\n<figure class="wide">{wide}</figure>\n'
        f'<figure class="narrow">{narrow}</figure>'
    )


def _section(section: Section) -> str:
    items = "".join(f"<li>{escape(line)}</li>\n" for line in section.lines)
    table = f"<pre>{escape(section.table)}</pre>\n" if section.table else ""
    return f"<h2>{escape(section.title)}</h2>\n<ul>\n{items}</ul>\n{table}"


def _inline(svg: str, prefix: str) -> str:
    """The SVG element for a page: with names of its own, in colours that follow the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    for colour, name in _COLOURS.items():
        svg = svg.replace(colour, name)
    return svg

"""The report as one page that loads nothing and needs no script."""

import os
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from torchtune_adaptive.report.pictures import Picture
from torchtune_adaptive.report.story import Section

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 24px 20px 48px; max-width: 1000px;
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif; }
h1 { font-size: 24px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 8px; }
ul { margin: 8px 0; padding-left: 20px; }
li { overflow-wrap: anywhere; }
pre { overflow-x: auto; padding: 12px; border: 1px solid gray; border-radius: 6px; font-size: 12px; }
img { display: block; width: 100%; }
"""


def page(output_dir: Path, sections: Sequence[Section], pictures: Sequence[Picture]) -> str:
    """The page as HTML, with the pictures first."""
    title = escape(f"Run in {os.fsencode(output_dir).decode(errors='replace')}")
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>",
        *(_figure(picture) for picture in pictures),
        *(_section(section) for section in sections),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _figure(picture: Picture) -> str:
    title, content = escape(picture.title), b64encode(picture.svg().encode()).decode()
    return f'<h2>{title}</h2>\n<img alt="{title}" src="data:image/svg+xml;base64,{content}">'


def _section(section: Section) -> str:
    items = "".join(f"<li>{escape(line)}</li>\n" for line in section.lines)
    table = f"<pre>{escape(section.table)}</pre>\n" if section.table else ""
    return f"<h2>{escape(section.title)}</h2>\n<ul>\n{items}</ul>\n{table}"

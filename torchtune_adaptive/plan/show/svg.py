"""SVG elements as text."""

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr


def element(name: str, *children: str, **attributes: object) -> str:
    """The element with its children, which are elements or escaped text. "_" in an attribute's name becomes "-".

    >>> element("text", "a", x=1.25, text_anchor="end")
    '<text x="1.2" text-anchor="end">a</text>'
    """
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(rounded(value) if isinstance(value, float) else str(value))}"
        for key, value in attributes.items()
    )
    return f"<{name}{given}>{''.join(children)}</{name}>" if children else f"<{name}{given}/>"


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """A line of text at ``x``, with its base line at ``y``. ``text_anchor`` can make it end at ``x``."""
    return element("text", escape(content), x=float(x), y=float(y), **attributes)


def titled(title: str, name: str, **attributes: object) -> str:
    """An element without children; a browser shows ``title`` as its tooltip."""
    return element(name, element("title", escape(title)), **attributes)


def area_of_steps(heights: Iterable[float], *, left: float, bottom: float) -> str:
    """The outline of columns one pixel wide with these ``heights`` above ``bottom``. Equal neighbours are merged.

    >>> area_of_steps([2, 2, 5], left=10, bottom=100)
    'M10 100v-2h2v-3h1V100z'
    """
    path = [f"M{rounded(left)} {rounded(bottom)}"]
    width, now = 0, 0  # in tenths, so that rounding errors do not accumulate
    for height in (round(10 * one) for one in heights):
        if height != now:
            path.append(f"h{width}" * (width > 0) + f"v{rounded((now - height) / 10)}")
            width, now = 0, height
        width += 1
    return "".join([*path, f"h{width}V{rounded(bottom)}z"])


def rounded(number: float) -> str:
    """The number rounded to a tenth, in its shortest form.

    >>> rounded(3.0), rounded(-0.04), rounded(12.34)
    ('3', '0', '12.3')
    """
    return f"{round(number, 1) + 0:g}" if abs(number) < 1e5 else f"{number:.0f}"

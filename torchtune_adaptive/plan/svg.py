"""SVG elements as text."""

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr


def element(name: str, *children: str, **attributes: object) -> str:
    """The element with its children, which are elements or escaped text. In an attribute's name "_" stands for "-".

    >>> element("text", "a", x=1.25, text_anchor="end")
    '<text x="1.2" text-anchor="end">a</text>'
    """
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(rounded(value) if isinstance(value, float) else str(value))}"
        for key, value in attributes.items()
    )
    return f"<{name}{given}>{''.join(children)}</{name}>" if children else f"<{name}{given}/>"


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """A line of text that begins, or by ``text_anchor`` ends, at ``x``, with its base line at ``y``."""
    return element("text", escape(content), x=float(x), y=float(y), **attributes)


def titled(title: str, name: str, **attributes: object) -> str:
    """An element without children for which a browser shows ``title``."""
    return element(name, element("title", escape(title)), **attributes)


def area_of_steps(heights: Iterable[float], *, left: float, bottom: float) -> str:
    """The path around columns of one pixel's width, of these ``heights`` above ``bottom``; equal ones are one step.

    >>> area_of_steps([2, 2, 5], left=10, bottom=100)
    'M10 100v-2h2v-3h1V100z'
    """
    path = [f"M{rounded(left)} {rounded(bottom)}"]
    width, now = 0, 0  # in tenths, so that rounding does not add up
    for height in (round(10 * one) for one in heights):
        if height != now:
            path.append(f"h{width}" * (width > 0) + f"v{rounded((now - height) / 10)}")
            width, now = 0, height
        width += 1
    return "".join([*path, f"h{width}V{rounded(bottom)}z"])


def rounded(number: float) -> str:
    """The number to a tenth, as short as it can be written.

    >>> rounded(3.0), rounded(-0.04), rounded(12.34)
    ('3', '0', '12.3')
    """
    return f"{round(number, 1) + 0:g}" if abs(number) < 1e5 else f"{number:.0f}"

"""Colours and style of all pictures, which matplotlib draws."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# On a paper of its own, a picture is legible on a light page and on a dark one.
INK, SOFT, LINE, PAPER = "#1b1f24", "#57606a", "#d8dee4", "#ffffff"
# Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, SKY, ORANGE, GREEN, RED, PINK, GREY = (
    "#0072b2",
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#999999",
)
INSTALL = '`pip install "torchtune-adaptive[plot]"`'  # what adds matplotlib
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, and is wide: what has room in it has room in other fonts
    "font.size": 9,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-3, 6),
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "hatch.color": SOFT,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "legend.handlelength": 1.7,
    "legend.columnspacing": 1.4,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "svg.fonttype": "none",
    "svg.hashsalt": "torchtune_adaptive",
}


def svg_of(draw: Callable[[], "Figure"]) -> str:
    """The figure that ``draw`` makes, as SVG, with text that stays text. It needs matplotlib."""
    import matplotlib as mpl

    content = io.StringIO()
    with mpl.rc_context(_STYLE):
        draw().savefig(content, facecolor=PAPER, format="svg", metadata={"Date": None, "Creator": None})
    return content.getvalue().replace("'DejaVu Sans'", _FONT)

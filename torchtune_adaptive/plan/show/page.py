"""A step's plot as a page that shows the live memory under the pointer."""

import json
from html import escape
from typing import Any

from torchtune_adaptive.plan.show.plot import COLOURS, LEFT, PLOT_HEIGHT, TOP, StepPlot
from torchtune_adaptive.plan.trace.events import StepEvents

_STYLE = """
body { margin: 24px; font: 13px system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif; }
svg { display: block; margin: auto; max-width: 100%; height: auto; }
svg * { pointer-events: none; }
#tip { position: fixed; display: none; padding: 8px 10px; border: 1px solid #d8dee4; border-radius: 6px;
  background: #fff; box-shadow: 0 2px 8px #0003; pointer-events: none; color: #1b1f24; }
#tip td { padding: 1px 0 1px 12px; text-align: right; font-variant-numeric: tabular-nums; }
#tip td:first-child { padding-left: 0; text-align: left; }
#tip i { display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 2px; }
"""
_SCRIPT = """
const step = JSON.parse(document.getElementById("step").textContent);
const svg = document.querySelector("svg"), tip = document.getElementById("tip");
const line = document.createElementNS(svg.namespaceURI, "path");
line.setAttribute("stroke", "#1b1f24");
svg.append(line);
const size = bytes => {
  for (const [unit, one] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (bytes >= one) return (bytes / one).toFixed(2) + " " + unit;
  return bytes + " B";
};
const row = (table, name, bytes, colour) => {
  const cells = table.insertRow(), first = cells.insertCell();
  if (colour) first.append(Object.assign(document.createElement("i"), {style: "background:" + colour}));
  first.append(name);
  cells.insertCell().append(size(bytes));
};
svg.addEventListener("pointermove", event => {
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const pixel = Math.floor(at.x - step.left), shown = step.pixels[pixel];
  const inside = shown && at.y >= step.top && at.y <= step.top + step.height;
  tip.style.display = inside ? "block" : "none";
  line.setAttribute("d", inside ? `M${step.left + pixel + 0.5} ${step.top}v${step.height}` : "");
  if (!inside) return;
  const [number, name, phase, module, ...held] = shown, table = document.createElement("table");
  row(table, "total", held.reduce((sum, bytes) => sum + bytes, 0));
  step.kinds.forEach(([kind, colour], place) => held[place] && row(table, kind, held[place], colour));
  const title = Object.assign(document.createElement("b"), {textContent: step.names[name]});
  const operation = `operation ${(number + 1).toLocaleString("en")}`;
  const where = `${operation}, ${step.names[phase]}, ${step.names[module]}`;
  tip.replaceChildren(title, document.createElement("br"), where, table);
  tip.style.left = Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
});
svg.addEventListener("pointerleave", () => { tip.style.display = "none"; line.setAttribute("d", ""); });
"""


def page(plot: StepPlot, events: StepEvents, *, title: str) -> str:
    """The plot of ``events`` as self-contained HTML."""
    content = json.dumps(_step(plot, events), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n{plot.svg()}"
        f'<div id="tip"></div>\n<script type="application/json" id="step">{content}</script>\n'
        f"<script>{_SCRIPT}</script>\n</html>\n"
    )


def _step(plot: StepPlot, events: StepEvents) -> dict[str, Any]:
    """The script's data. A pixel refers to names by their index in a list."""
    numbers: dict[str, int] = {}
    kinds = plot.kinds[::-1]  # from the top
    pixels = [
        [
            operation,
            *(numbers.setdefault(name, len(numbers)) for name in events.operations[operation]),
            *(events.live_bytes[kind][operation] for kind in kinds),
        ]
        for operation in plot.shown
    ]
    return {
        "left": LEFT,
        "top": TOP,
        "height": PLOT_HEIGHT,
        "kinds": [[kind, COLOURS[kind]] for kind in kinds],
        "names": list(numbers),
        "pixels": pixels,
    }

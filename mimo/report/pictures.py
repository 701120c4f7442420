"""Curves and bars as pictures inside a page: SVG in an address, where it can only be seen."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from mimo.report.runs import Curve

_WIDTH = 9.2  # inches, at 72 points each
_LOG_RATIO = 50.0  # what has no unit and a greater range than this gets a logarithmic axis
_STYLE: Any = {  # its keys are of a type of matplotlib's
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # names are a stranger's
}


@dataclass(frozen=True)
class Picture:
    """title: also what a page says where it shows no pictures. address: a `data:` URL.

    figure: that it was drawn as, if it was. other_address: with the other scale, linear or
    logarithmic, if that can be chosen. is_log: whether the scale of ``address`` is logarithmic.
    curves: for the page's script: JSON of what is drawn, and where.
    """

    title: str
    address: str
    figure: Figure | None = None
    other_address: str = ""
    is_log: bool = False
    curves: str = ""

    def write_png(self, path: Path) -> None:
        """The same as a file, if it was drawn."""
        if self.figure is not None:
            self.figure.suptitle(self.title, fontsize=10)
            self.figure.savefig(path, dpi=150, metadata={"Software": None})


def is_flat_zero(curve: Curve) -> bool:
    """Whether a curve has nothing to show: no number but zeros."""
    return not curve.finite.any()


def data_url(content: bytes, kind: str) -> str:
    """A picture's bytes as an address. kind: `png` or `svg+xml`."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


@mpl.rc_context(_STYLE)
def lines(title: str, unit: str, curves: Mapping[str, Curve]) -> Picture:
    """Curves over the steps, with a linear and, if any value is above 0, a logarithmic axis."""
    figure, axes = _figure(2.4)
    everything = np.concatenate([one.finite for one in curves.values()] or [np.zeros(0)])
    told = []
    for name, curve in curves.items():
        few = {"marker": "o", "markersize": 3} if len(curve.steps) <= 30 else {}
        (line,) = axes.plot(curve.steps, curve.values, linewidth=1, label=f" {name}", **few)
        values = [float(f"{one:.6g}") if np.isfinite(one) else None for one in curve.values]
        own = {"name": name, "color": to_hex(line.get_color()), "steps": curve.steps.tolist()}
        told += [own | {"values": values}] if values else []
    axes.set(xlabel="step", ylabel=unit)
    _legend(axes, len(curves))
    above = everything[everything > 0]
    has_log = len(np.unique(above)) > 1
    is_log = has_log and not unit and bool(0 < everything.min() * _LOG_RATIO < everything.max())
    drawn = []
    for log in (not is_log, is_log) if has_log else (False,):
        axes.set_yscale("linear")
        if log:
            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_formatter("{x:g}")
        address = _address(figure)
        box, (first, last) = axes.get_position(), axes.get_xlim()
        place = {"left": box.x0, "right": box.x1, "top": 1 - box.y1, "bottom": 1 - box.y0}
        drawn.append((address, place | {"first": first, "last": last}))
    other, shown = drawn[0], drawn[-1]
    script = json.dumps({"plots": [shown[1], other[1]], "curves": told}) if told else ""
    return Picture(title, shown[0], figure, other[0] if has_log else "", is_log, script)


@mpl.rc_context(_STYLE)
def spreads(title: str, unit: str, rows: Mapping[str, Sequence[float]]) -> Picture:
    """One bar per row, as long as the median of its values, with lines from the least to the most.

    Rows without values have no bar.
    """
    figure, axes = _figure(0.8 + 0.3 * len(rows))
    for place, values in enumerate(rows.values()):
        if values:
            middle = float(np.median(values))
            reach = [[middle - min(values)], [max(values) - middle]]
            axes.barh(place, middle, color="tab:blue", xerr=reach if len(values) > 1 else None)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlabel=unit, ylim=(len(rows) - 0.5, -0.5))
    return _done(title, figure)


@mpl.rc_context(_STYLE)
def shares(title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> Picture:
    """One bar per row, made of named parts."""
    figure, axes = _figure(1.4 + 0.3 * len(rows))
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    colors = dict(zip(names, mpl.color_sequences["tab20"], strict=False))
    ends = np.zeros(len(rows))
    for name in names:
        widths = np.array([parts.get(name, 0.0) for parts in rows.values()])
        places = range(len(rows))
        axes.barh(places, widths, left=ends, label=f" {name}", color=colors.get(name, "grey"))
        ends += widths
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set(xlabel=unit)
    _legend(axes, len(names))
    return _done(title, figure)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _legend(axes: Axes, count: int) -> None:
    if count:  # a leading blank, as matplotlib leaves out names that begin with "_"
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _done(title: str, figure: Figure) -> Picture:
    return Picture(title, _address(figure), figure)


def _address(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return data_url(buffer.getvalue(), "svg+xml")

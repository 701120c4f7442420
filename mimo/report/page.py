"""Pages of one HTML file that need no network, and their pictures.

A page has parts, a part has tiles and sections, a section has pictures, tables, charts and samples.
Pictures are SVG in an address, where no script can run.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from mimo.report.runs import Curve
from mimo.report.tables import Table

_PICTURE_WIDTH = 9.2  # inches, at 72 points each
_BINS = 500  # that a longer curve is cut into
_LOG_RATIO = 50.0  # values without a unit get a logarithmic axis beyond this range
_STYLE: Any = {  # its keys are of a type of matplotlib's
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # names may come from a stranger
}


@dataclass(frozen=True)
class Picture:
    """A picture as a `data:` URL.

    figure: the source of `write_png`, if matplotlib drew it. other_address: the same picture with
    the other scale, linear or logarithmic, if a reader can choose. is_log: whether ``address`` has
    the logarithmic scale. curves: JSON of the curves and their place, for the page's script.
    """

    title: str
    address: str
    figure: Figure | None = None
    other_address: str = ""
    is_log: bool = False
    curves: str = ""

    def write_png(self, path: Path) -> None:
        if self.figure is not None:
            self.figure.suptitle(self.title, fontsize=10)
            self.figure.savefig(path, dpi=150, metadata={"Software": None})


@dataclass(frozen=True)
class Chart:
    """A histogram. bars: of each bin the height in percent and its range and count as text."""

    title: str
    bars: Sequence[tuple[float, str]]
    note: str


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind. learned: in the loss. times: of a repeated special token."""

    text: str
    learned: bool
    special: bool = False
    times: int = 1


@dataclass(frozen=True)
class Sample:
    """A sample of the data. images: addresses of its pictures."""

    title: str
    note: str
    images: Sequence[str]
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Section:
    """note: a sentence above everything else. text: a long text that is folded away."""

    title: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    text: str = ""
    charts: Sequence[Chart] = ()
    samples: Sequence[Sample] = ()

    @property
    def has_content(self) -> bool:
        content = (self.pictures, self.text, self.note, self.charts, self.samples)
        return any(content) or any(table.rows for table in self.tables)


@dataclass(frozen=True)
class Part:
    """A part of a page; a lone one has no title. tiles: figures at a glance. facts: its subject."""

    title: str
    tiles: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[Section] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def render(title: str, parts: Sequence[Part]) -> str:
    """Return the page as HTML, with all texts escaped."""
    environment = Environment(
        loader=PackageLoader("mimo.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    pictures = [p for part in parts for section in part.sections for p in section.pictures]
    has_curves = any(picture.curves for picture in pictures)
    script = (files("mimo.report") / "page.js").read_text(encoding="utf-8") if has_curves else ""
    page = environment.get_template("page.html")
    return page.render(title=title, parts=parts, script=Markup(script))


def data_url(content: bytes, kind: str) -> str:
    """Return a picture's bytes as an address. kind: `png` or `svg+xml`."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


@mpl.rc_context(_STYLE)
def lines(title: str, unit: str, curves: Mapping[str, Curve]) -> Picture:
    """Draw curves over the steps, with a linear and, if values are positive, a logarithmic axis."""
    figure, axes = _figure(2.4)
    values = np.concatenate([curve.finite for curve in curves.values()] or [np.zeros(0)])
    data = []
    for name, curve in ((name, _thinned(curve)) for name, curve in curves.items()):
        markers = {"marker": "o", "markersize": 3} if len(curve.steps) <= 30 else {}
        (line,) = axes.plot(curve.steps, curve.values, linewidth=1, label=f" {name}", **markers)
        points = [float(f"{y:.6g}") if np.isfinite(y) else None for y in curve.values]
        if points:
            color, steps = to_hex(line.get_color()), curve.steps.tolist()
            data.append({"name": name, "color": color, "steps": steps, "values": points})
    axes.set(xlabel="step", ylabel=unit)
    _legend(axes, len(curves))
    positive = values[values > 0]
    has_log = len(np.unique(positive)) > 1
    is_log = has_log and not unit and bool(0 < values.min() * _LOG_RATIO < values.max())
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
    script = json.dumps({"plots": [shown[1], other[1]], "curves": data}) if data else ""
    return Picture(title, shown[0], figure, other[0] if has_log else "", is_log, script)


@mpl.rc_context(_STYLE)
def heat_map(title: str, label: str, curves: Mapping[str, Curve]) -> Picture:
    """Draw curves of equal steps as rows of colours, the first at the bottom."""
    figure, axes = _figure(2.4)
    steps = next(iter(curves.values())).steps
    shown = np.unique(np.linspace(0, len(steps) - 1, _BINS).astype(int))
    values = np.stack([curve.values[shown] for curve in curves.values()])
    extent = (steps[0] - 0.5, steps[-1] + 0.5, -0.5, len(values) - 0.5)
    image = axes.imshow(values, aspect="auto", origin="lower", extent=extent)
    axes.set(xlabel="step", ylabel=label)
    figure.colorbar(image)
    return Picture(title, _address(figure), figure)


def _thinned(curve: Curve) -> Curve:
    """Return the first and the highest point of each of `_BINS` bins; NaN counts as highest."""
    if len(curve.steps) <= _BINS:
        return curve
    width = len(curve.steps) // _BINS
    starts = range(0, len(curve.steps), width)
    highest = [start + int(curve.values[start : start + width].argmax()) for start in starts]
    kept = np.unique([*starts, *highest, len(curve.steps) - 1])
    return Curve(curve.steps[kept], curve.values[kept])


@mpl.rc_context(_STYLE)
def spreads(title: str, unit: str, rows: Mapping[str, Sequence[float]]) -> Picture:
    """Draw a bar per row with values: their median, with a line from the least to the most."""
    figure, axes = _figure(0.8 + 0.3 * len(rows))
    for place, values in enumerate(rows.values()):
        if values:
            middle = float(np.median(values))
            reach = [[middle - min(values)], [max(values) - middle]]
            axes.barh(place, middle, color="tab:blue", xerr=reach if len(values) > 1 else None)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlabel=unit, ylim=(len(rows) - 0.5, -0.5))
    return Picture(title, _address(figure), figure)


@mpl.rc_context(_STYLE)
def shares(title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw one bar per row, made of named parts."""
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
    return Picture(title, _address(figure), figure)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_PICTURE_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _legend(axes: Axes, count: int) -> None:
    if count:  # labels begin with a blank, because matplotlib leaves out names that begin with "_"
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def _address(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return data_url(buffer.getvalue(), "svg+xml")

"""Plots of `packshift bench` as SVG, drawn by matplotlib (the extra `packshift[report]`), which is imported only here.

A plot is as wide as a phone, so that its text is legible there, and is there for a light and for a dark page. Lines have
their names at their ends instead of a legend, and differ in marker and dashes as well as in colour. The text of an SVG
stays text; equal results give equal bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packshift.bench_results import Bench, Row
from packshift.bench_words import PICTURES, grouped, number
from packshift.errors import PackshiftError
from packshift.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCH = 72  # points
_WIDTH, _HEIGHT = 300, 215  # points; a point is about a CSS pixel on a phone
_LEFT, _BOTTOM, _TOP, _RIGHT = 54, 36, 10, 12
_TEXT = 10
_LETTER = 0.62 * _TEXT  # wide, since the reader's fonts are not known
_LINE = 1.2 * _TEXT
_LETTERS = 16  # of a name in one line
_MARKERS = "os^Dv"
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "packshift",
    "font.family": "sans-serif",
    "font.size": _TEXT,
    "text.parse_math": False,
    "text.usetex": False,
    "axes.unicode_minus": False,
}


@dataclass(frozen=True)
class Theme:
    """Colours of a page. Lines are told apart by the colour-blind, and are legible as text on the background."""

    background: str
    text: str
    faint: str
    lines: tuple[str, ...]

    @property
    def colours(self) -> tuple[str, ...]:
        return (self.background, self.text, self.faint, *self.lines)


LIGHT = Theme("#ffffff", "#1f2328", "#d0d4d9", ("#b3501b", "#003f6e", "#007a5a", "#bf00e6", "#33250a"))
DARK = Theme("#16191d", "#e6e8eb", "#3c434b", ("#e06a40", "#4c9dff", "#4dffac", "#99828f", "#fff766"))


@dataclass(frozen=True)
class Plot:
    """One plot, with a title and a sentence for those who do not see it."""

    title: str
    alternative: str
    light: str
    dark: str


def require_matplotlib() -> None:
    """Raise unless plots can be drawn: to be called before minutes of measuring."""
    try:
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise PackshiftError(f"an HTML report needs matplotlib ({error}): pip install 'packshift[report]'") from error


_Value = Callable[[Row], "float | None"]


def plots(bench: Bench) -> list[Plot]:
    """All plots that the results have values for."""
    require_matplotlib()
    rows = [row for row in bench.rows if row.error is None]
    recommended = bench.verdict.row if bench.verdict else None
    charts = [
        _against_workers("Speed against workers", "images/s", lambda row: row.images_per_s, rows, extent=_extent),
        _against_size("Speed against disk size", rows),
        _against_workers("RSS against workers", "MB, all processes", _sum_of("rss"), rows),
        _against_workers("PSS against workers", "MB, all processes", _sum_of("pss"), rows),
        _against_workers("USS against workers", "MB, all processes", _sum_of("uss"), rows),
        _against_workers("Total memory against workers", "MB", lambda row: row.total_mb, rows),
    ]
    return [chart.plot(recommended) for chart in charts if chart.lines]


def _sum_of(kind: str) -> _Value:
    def value(row: Row) -> float | None:
        main, worker = getattr(row, f"main_{kind}_mb"), getattr(row, f"worker_{kind}_mb")
        return None if main is None else float(main + (worker or 0) * row.num_workers)

    return value


def _extent(row: Row) -> tuple[float, float] | None:
    """The slowest and the fastest run."""
    return (min(row.images_per_s_runs), max(row.images_per_s_runs)) if row.images_per_s_runs else None


@dataclass(frozen=True)
class _Point:
    x: float
    y: float
    row: Row
    extent: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Line:
    """Cases of one format and loader: `colour` and marker stand for the format, `dashes` for the rest."""

    name: str
    label: str
    points: tuple[_Point, ...]
    labelled: _Point
    colour: int
    dashes: int


@dataclass(frozen=True)
class _Chart:
    """What a plot shows. `ticks` are names of the places 0, 1, 2 ... on the x axis, where it has names."""

    title: str
    x_name: str
    y_name: str
    alternative: str
    lines: tuple[_Line, ...]
    ticks: tuple[str, ...] = ()

    def plot(self, recommended: Row | None) -> Plot:
        light = _svg(self, recommended, LIGHT)
        return Plot(self.title, self.alternative, light, _recoloured(light, LIGHT, DARK))


def _against_workers(
    title: str,
    unit: str,
    value: _Value,
    rows: Sequence[Row],
    extent: Callable[[Row], tuple[float, float] | None] = lambda row: None,
) -> _Chart:
    rows = [row for row in rows if value(row) is not None]
    counts = sorted({row.num_workers for row in rows})
    lines = []
    kinds = _kinds(rows)
    for place, (name, members, colour, dashes) in enumerate(kinds):
        aside = min(0.06, 0.3 / len(kinds)) * (place - (len(kinds) - 1) / 2)  # lines that coincide are both seen
        points = tuple(
            _Point(counts.index(row.num_workers) + aside, value(row) or 0, row, extent(row))
            for row in sorted(members, key=lambda row: row.num_workers)
        )
        lines.append(_Line(name, f"{name} {number(points[-1].y)}", points, points[-1], colour, dashes))
    said = "; ".join(
        f"{line.name}: " + ", ".join(f"{number(point.y)} with {point.row.num_workers}" for point in line.points)
        for line in lines
    )
    x_name = "workers or threads" if any(row.loader == "threads" for row in rows) else "workers"
    return _Chart(title, x_name, unit, f"{title}, in {unit}. {said}.", tuple(lines), tuple(map(str, counts)))


def _against_size(title: str, rows: Sequence[Row]) -> _Chart:
    rows = [row for row in rows if row.images_per_s is not None]
    lines = []
    for name, members, colour, dashes in _kinds(rows):
        points = tuple(_Point(row.store_mb, row.images_per_s or 0, row) for row in members)
        lines.append(_Line(name, name, points, max(points, key=lambda point: point.y), colour, dashes))
    said = "; ".join(
        f"{line.name}: at best {number(line.labelled.y)} images/s from {number(line.labelled.x)} MB" for line in lines
    )
    return _Chart(title, "MB on disk", "images/s", f"{title}. {said}.", tuple(lines))


def _kinds(rows: Sequence[Row]) -> list[tuple[str, list[Row], int, int]]:
    """Rows that differ in the number of workers only: their name, the rows, the numbers of their colour and dashes."""
    formats = [PICTURES, *dict.fromkeys(row.format for row in rows if row.format != PICTURES)]
    several_loaders = len({row.loader for row in rows}) > 1
    found: dict[tuple[str, str], list[Row]] = {}
    for group, members in grouped(rows).items():
        for row in members:
            rest = ", ".join(word for word in (row.loader if several_loaders else "", group) if word)
            rest = rest.removesuffix(", warm page cache").removesuffix("warm page cache")
            found.setdefault((row.format, rest), []).append(row)
    rests = list(dict.fromkeys(rest for _, rest in found))
    return [
        (printable(f"{format}, {rest}" if rest else format), members, formats.index(format), rests.index(rest))
        for (format, rest), members in found.items()
    ]


def _svg(chart: _Chart, recommended: Row | None, theme: Theme) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        labels = [textwrap.wrap(line.label, _LETTERS) for line in chart.lines]
        beside = chart.ticks and max(len(part) for label in labels for part in label) * _LETTER + 16
        inside = max(_HEIGHT - _BOTTOM - _TOP, sum(map(len, labels)) * _LINE)
        width, height = _WIDTH - _LEFT - (beside or _RIGHT), inside + _BOTTOM + _TOP
        figure = Figure(figsize=(_WIDTH / _INCH, height / _INCH), facecolor=theme.background)
        FigureCanvasSVG(figure)
        axes = figure.add_axes((_LEFT / _WIDTH, _BOTTOM / height, width / _WIDTH, inside / height))
        _prepare(axes, chart, theme)
        for line in chart.lines:
            _draw(axes, line, theme, joined=bool(chart.ticks), recommended=recommended)
        _label(axes, chart, labels, theme, (width, inside))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return text.getvalue()[text.getvalue().index("<svg") :]


def _recoloured(svg: str, theme: Theme, other: Theme) -> str:
    """The same plot in the colours of another theme."""
    colours = dict(zip(theme.colours, other.colours, strict=True))
    return re.sub(r"(?<=: )#[0-9a-f]{6}", lambda found: colours[found[0]], svg)


def _prepare(axes: Axes, chart: _Chart, theme: Theme) -> None:
    points = [point for line in chart.lines for point in line.points]
    top = max(max(point.y, point.extent[1] if point.extent else 0) for point in points)
    axes.set_ylim(0, top * 1.1 or 1)
    if chart.ticks:
        axes.set_xlim(-0.25, len(chart.ticks) - 0.75)
        axes.set_xticks(range(len(chart.ticks)), chart.ticks)
    else:
        axes.set_xlim(0, max(point.x for point in points) * 1.1 or 1)
        axes.xaxis.set_major_formatter("{x:,.10g}")
        axes.locator_params("x", nbins=5)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.locator_params("y", nbins=6)
    axes.set_xlabel(chart.x_name, color=theme.text)
    axes.set_ylabel(chart.y_name, color=theme.text)
    axes.set_facecolor(theme.background)
    axes.tick_params(colors=theme.text, length=0)
    axes.grid(axis="y", color=theme.faint, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.text)


def _draw(axes: Axes, line: _Line, theme: Theme, *, joined: bool, recommended: Row | None) -> None:
    number = line.colour % len(theme.lines)
    colour, marker = theme.lines[number], _MARKERS[number]
    if joined:
        places = [point.x for point in line.points], [point.y for point in line.points]
        axes.plot(*places, color=colour, linewidth=1.8, linestyle=_DASHES[line.dashes % len(_DASHES)])
    face = colour if line.dashes == 0 else theme.background
    for point in line.points:
        if point.extent:
            axes.plot([point.x] * 2, point.extent, color=colour, linewidth=5, alpha=0.4, solid_capstyle="butt")
        style: dict[str, Any] = {"marker": marker, "color": colour, "markerfacecolor": face, "linestyle": "none"}
        axes.plot(
            [point.x], [point.y], markersize=6 if joined or point is line.labelled else 3.5, clip_on=False, **style
        )
        if point.row == recommended:
            ring: dict[str, Any] = {"marker": "o", "markersize": 14, "color": theme.text, "markerfacecolor": "none"}
            axes.plot([point.x], [point.y], linestyle="none", **ring)


def _label(axes: Axes, chart: _Chart, labels: Sequence[Sequence[str]], theme: Theme, size: tuple[float, float]) -> None:
    """Names at the right of the plot, or beside points that have no line, moved apart where they would overlap."""
    width, height = size
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    low, _ = axes.get_xlim()
    ends = [((line.labelled.x - low) / (right - low) * width, line.labelled.y / top * height) for line in chart.lines]
    heights = [len(label) * _LINE for label in labels]
    middles = _apart([y for _, y in ends], heights, height)
    for line, label, end, y in zip(chart.lines, labels, ends, middles, strict=True):
        right_of_it = bool(chart.ticks) or end[0] < width / 2
        x = width + 12 if chart.ticks else end[0] + (12 if right_of_it else -12)
        colour = theme.lines[line.colour % len(theme.lines)]
        axes.annotate(
            "\n".join(label),
            xy=end,
            xycoords="axes points",
            xytext=(x, y),
            textcoords="axes points",
            color=colour,
            ha="left" if right_of_it else "right",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.8,
                "relpos": (0 if right_of_it else 1, 0.5),
                "shrinkA": 1,
                "shrinkB": 5,
            },
        )


def _apart(wanted: Sequence[float], heights: Sequence[float], top: float) -> list[float]:
    """Middles of boxes of these heights, as near to the wanted ones as no overlap and 0 to `top` allow."""
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    found = [0.0] * len(wanted)
    floor = 0.0
    for place in order:
        found[place] = max(wanted[place], floor + heights[place] / 2)
        floor = found[place] + heights[place] / 2
    for place in reversed(order):
        found[place] = min(found[place], top - heights[place] / 2)
        top = found[place] - heights[place] / 2
    return found

"""What `packshift bench` found out as one HTML file that needs nothing else: no network, no script, no font.

It is read on phones and on dark screens, too: a wide table scrolls in its own box, and each plot is there twice. The file
forbids itself scripts and network, so that no text in it can do harm, whatever the names of the files were.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from packshift.bench_plots import Plot, plots, require_matplotlib
from packshift.bench_results import Bench, Row
from packshift.bench_words import (
    CONSUMER_COLUMNS,
    MEMORY_COLUMNS,
    MEMORY_COLUMNS_EXPLAINED,
    SPEED_COLUMNS,
    STAGES_EXPLAINED,
    STAGES_HEAD,
    STAGES_TITLE,
    Column,
    best_rows,
    case_text,
    consumer_text,
    grouped,
    heading_text,
    note_texts,
    setting_texts,
    size_text,
    sizes,
    stage_lines,
    verdict_texts,
)
from packshift.text import counted, printable

__all__ = ["bench_html", "require_matplotlib"]

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1f2328; --faint: #59636e; --line: #d0d4d9;
  --soft: #f3f5f7; --best: #d7f0dd; --chosen: #0062a8; --failed: #a3200d; }
@media (prefers-color-scheme: dark) { :root { --page: #16191d; --text: #e6e8eb; --faint: #a0a8b1; --line: #3c434b;
  --soft: #22272d; --best: #1e4a2c; --chosen: #6cb8f5; --failed: #ff9a85; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .5rem 0; max-width: 46rem; }
.about, figcaption { color: var(--faint); }
.verdict { border-left: .3rem solid var(--chosen); background: var(--soft); padding: .5rem 1rem; }
.verdict p:first-child { font-size: 1.15rem; font-weight: 600; }
.plots { margin-top: 1rem; display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr));
  gap: 1.5rem; }
figure { margin: 0; min-width: 0; max-width: 31rem; }
figure img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .3rem; }
table { border-collapse: collapse; font-size: .875rem; overflow-wrap: break-word; font-variant-numeric: tabular-nums; }
.wide { min-width: 100%; }
th, td { padding: .35rem .55rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { white-space: normal; vertical-align: bottom; min-width: 3.75rem; background: var(--soft); }
tbody tr:last-child > * { border-bottom: 0; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--soft); font-weight: 500; }
tbody th:first-child { white-space: normal; min-width: 8.5rem; }
@media (min-width: 60rem) { tbody th:first-child { min-width: 15rem; } }
td.text { text-align: left; white-space: normal; min-width: 10rem; }
td.best { background: var(--best); font-weight: 600; }
td.failed { text-align: left; white-space: normal; color: var(--failed); min-width: 18rem; }
tr.chosen th { border-left: .3rem solid var(--chosen); font-weight: 700; }
tr.group th { font-style: italic; }
dl { display: grid; grid-template-columns: minmax(6rem, auto) 1fr; gap: .25rem 1rem; margin: .5rem 0; }
dt { color: var(--faint); }
dd { margin: 0; min-width: 0; }
""".strip()


def bench_html(bench: Bench) -> str:
    """The page; raises PackshiftError where matplotlib is missing."""
    return "\n".join(
        ["<!DOCTYPE html>", '<html lang="en">', *_head(), "<body>", *_body(bench), "</body>", "</html>", ""]
    )


def _head() -> Iterator[str]:
    yield "<head>"
    yield '<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">'
    yield "<title>packshift bench: which format, how many workers</title>"
    yield f"<style>\n{_STYLE}\n</style>"
    yield "</head>"


def _body(bench: Bench) -> Iterator[str]:
    drawn = plots(bench)
    measured = [row for row in bench.rows if row.error is None]
    yield "<main>"
    yield "<h1>Which format, and how many workers?</h1>"
    yield _paragraph(f"packshift bench: {heading_text(bench)}", "about")
    yield '<section class="verdict" aria-label="Recommendation">'
    yield from map(_paragraph, verdict_texts(bench))
    yield "</section>"
    yield from _plots("Speed", _SPEED_CAPTION, [plot for plot in drawn if "Speed" in plot.title])
    yield from _plots("Memory", _MEMORY_CAPTION, [plot for plot in drawn if "Speed" not in plot.title])
    yield "<h2>All figures</h2>"
    yield _paragraph("A star: the best of its column. A table that is wider than the screen scrolls sideways.", "about")
    yield from _cases("All figures", (*SPEED_COLUMNS, *MEMORY_COLUMNS), bench, bench.rows)
    if (consumer := consumer_text(bench.settings)) and measured:
        yield f"<h2>{_escaped(f'With {consumer}')}</h2>"
        yield from _cases("With a consumer", CONSUMER_COLUMNS, bench, measured)
    if stages := list(stage_lines(measured)):
        yield f"<h2>{STAGES_TITLE[0].upper()}{STAGES_TITLE[1:]}</h2>"
        yield _paragraph(STAGES_EXPLAINED, "about")
        yield from _stages(stages)
    yield "<h2>On disk</h2>"
    yield from _sizes(bench)
    if notes := note_texts(bench):
        yield "<h2>Notes</h2>"
        yield from _list("ul", (f"<li>{escape(note)}</li>" for note in notes))
    for title, values in (("Machine", bench.machine), ("Settings", bench.settings)):
        if facts := list(setting_texts(values)):
            yield f"<h2>{title}</h2>"
            yield from _list("dl", (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts))
    yield "</main>"


_SPEED_CAPTION = (
    "Median of the runs; the broad stroke behind a point goes from the slowest run to the fastest, the ring is the "
    "recommended case. Against disk size, the largest point is the fastest number of workers."
)

_MEMORY_CAPTION = (
    f"{MEMORY_COLUMNS_EXPLAINED} Here RSS, PSS and USS are those of the main process and all workers added up; each plot "
    "has a scale of its own."
)


def _plots(title: str, caption: str, drawn: Sequence[Plot]) -> Iterator[str]:
    yield f"<h2>{title}</h2>"
    if not drawn:
        yield _paragraph("Nothing was measured, so there is nothing to draw.")
        return
    yield _paragraph(caption)
    yield '<div class="plots">'
    for plot in drawn:
        yield "<figure>"
        yield f"<figcaption><h3>{_escaped(plot.title)}</h3></figcaption>"
        yield "<picture>"
        yield f'<source media="(prefers-color-scheme: dark)" srcset="{_data(plot.dark)}">'
        yield f'<img src="{_data(plot.light)}" alt="{_escaped(plot.alternative)}">'
        yield "</picture>"
        yield "</figure>"
    yield "</div>"


def _cases(label: str, columns: Sequence[Column], bench: Bench, rows: Sequence[Row]) -> Iterator[str]:
    best = [best_rows(column, rows) for column in columns]
    groups = grouped(rows)
    yield f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">'
    yield '<table class="wide">'
    heads = "".join(f'<th scope="col">{_escaped(column.name)}</th>' for column in columns)
    yield f'<thead><tr><th scope="col">case</th>{heads}</tr></thead>'
    yield "<tbody>"
    for group, members in groups.items():
        if len(groups) > 1:
            yield f'<tr class="group"><th>{_escaped(group or "without workers")}</th><td colspan="{len(columns)}"></td></tr>'
        for row in members:
            chosen = bench.verdict is not None and row == bench.verdict.row
            case = f'<th scope="row">{_escaped(case_text(row))}{" (recommended)" if chosen else ""}</th>'
            if row.error is not None:
                figures = f'<td class="failed" colspan="{len(columns)}">failed: {_escaped(row.error)}</td>'
            else:
                figures = "".join(
                    f'<td class="best">{column.text(row)}★</td>'
                    if any(row is each for each in winners)
                    else f"<td>{column.text(row)}</td>"
                    for column, winners in zip(columns, best, strict=True)
                )
            yield f"{'<tr class=chosen>' if chosen else '<tr>'}{case}{figures}</tr>"
    yield "</tbody>"
    yield "</table>"
    yield "</div>"


def _sizes(bench: Bench) -> Iterator[str]:
    yield '<div class="scroll" role="region" aria-label="On disk" tabindex="0">'
    yield "<table>"
    pictures = counted(bench.images, "picture")
    yield f'<thead><tr><th scope="col">format</th><th scope="col">{pictures}</th><th scope="col">conversion</th></tr></thead>'
    yield "<tbody>"
    for size in sizes(bench.rows):
        made = f'<td class="text">{size.making(bench.images)}</td>'
        yield f'<tr><th scope="row">{_escaped(size.format)}</th><td>{size_text(size)}</td>{made}</tr>'
    yield "</tbody>"
    yield "</table>"
    yield "</div>"


def _stages(lines: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f'<div class="scroll" role="region" aria-label="{STAGES_TITLE}" tabindex="0">'
    yield "<table>"
    yield "<thead><tr>" + "".join(f'<th scope="col">{name}</th>' for name in STAGES_HEAD) + "</tr></thead>"
    yield "<tbody>"
    for name, *figures in lines:
        yield f'<tr><th scope="row">{_escaped(name)}</th>' + "".join(f"<td>{text}</td>" for text in figures) + "</tr>"
    yield "</tbody>"
    yield "</table>"
    yield "</div>"


def _list(tag: str, items: Iterable[str]) -> Iterator[str]:
    yield f"<{tag}>"
    yield from items
    yield f"</{tag}>"


def _paragraph(text: str, kind: str = "") -> str:
    start = f'<p class="{kind}">' if kind else "<p>"
    return f"{start}{_escaped(text)}</p>"


def _escaped(text: str) -> str:
    return escape(printable(text))


def _data(svg: str) -> str:
    return "data:image/svg+xml;base64," + b64encode(svg.encode()).decode()

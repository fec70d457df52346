"""What `packshift bench` shows of its results: text for a terminal, CSV, and the HTML page, also in a real browser."""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from bench_values import failed, make_bench, make_row
from hypothesis import given, settings
from hypothesis import strategies as st

from packshift.bench_html import bench_html, require_matplotlib
from packshift.bench_plots import DARK, LIGHT, Theme, _apart, plots
from packshift.bench_report import bench_csv, bench_text
from packshift.bench_results import Bench, Row
from packshift.errors import PackshiftError

KILLED = "a worker was killed by signal 9: the control group's memory limit of 2.1 GB was reached 3 times"
NASTY = '<script>document.title="ran"</script><img src=x onerror=alert(1)>&amp;"\'\n\x1b[31m\udce4'
BENCHES = {
    "usual": make_bench(),
    "one case": make_bench(make_row("lmdb", 2)),
    "all failed": make_bench(failed("lmdb", 0, KILLED), failed("jpeg", 2, KILLED)),
    "no memory": make_bench(
        make_row("hdf5", 0, main_rss_mb=None, main_pss_mb=None, main_uss_mb=None, shm_mb=None, total_mb=None)
    ),
    "everything": make_bench(
        *(
            make_row(format, workers, loader)
            for format in ("jpeg", "lmdb", "hdf5")
            for loader in ("dataloader", "threads")
            for workers in (0, 4)
        ),
        failed("hdf5", 16, KILLED + " and again" * 30),
        make_row("lmdb", 2, cold=True, resident_before=0.0021, images_per_s=905.0, start_method="forkserver"),
        make_row("a format with a long name", 12, batch_size=128, images_per_s=1_234_567.0, prefetch_factor=4),
        settings={"step_ms": 20.0, "repeats": 3},
    ),
    "interrupted at once": make_bench(rows=(), verdict=None),
    "nasty": make_bench(
        replace(failed(NASTY, 2, NASTY), loader="\x1b[2J"),
        make_row("lmdb", 0),
        notes=(NASTY,),
        machine={NASTY: NASTY},
        settings={"out": NASTY},
    ),
}
every_bench = pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)


def table(text: str, title: str) -> list[str]:
    return next(part.splitlines() for part in text.split("\n\n") if part.startswith(title))


def line_of(text: str, title: str, *words: str) -> str:
    return next(line for line in table(text, title) if line.lstrip("> ").split()[:3] == list(words))


# Text


@every_bench
@pytest.mark.parametrize("width", [100, 120])
def test_no_line_is_wider_than_the_terminal(bench: Bench, width: int) -> None:
    assert max(map(len, bench_text(bench, width).splitlines())) <= width


@every_bench
def test_every_case_has_a_line(bench: Bench) -> None:
    text = bench_text(bench)
    cases = [line for line in table(text, "speed") if re.search(r"\d%|failed: ", line)]
    assert len(cases) == len(bench.rows)
    assert all(any(line[2:].startswith(row.format[:5]) for line in cases) for row in bench.rows)
    speeds = [f"{row.images_per_s:,.0f}" for row in bench.rows if row.images_per_s]
    assert not [speed for speed in speeds if speed not in text]


def test_the_figures_of_a_case() -> None:
    text = bench_text(BENCHES["usual"])
    speed = line_of(text, "speed", "lmdb", "dataloader", "2")
    assert speed.split()[4:-1] == ["19,152*", "5.1%", "74%", "3,765", "116", "0.174"]
    memory = line_of(text, "memory, MB", "lmdb", "dataloader", "2")
    assert memory.split()[4:] == ["645", "203", "34", "143", "25", "315"]
    assert line_of(text, "memory, MB", "jpeg", "dataloader", "0").split()[3:] == ["-", "-", "-", "141*", "0", "227*"]


def test_the_best_cells_have_a_star_and_the_recommended_case_an_arrow() -> None:
    text = bench_text(BENCHES["usual"])
    stars = [line for line in table(text, "speed") if "19,152*" in line]
    assert len(stars) == 1
    assert stars[0].startswith("> lmdb")
    assert [line for line in text.splitlines() if line.startswith(">")] == [
        stars[0],
        line_of(text, "memory, MB", "lmdb", "dataloader", "2"),
    ]
    assert "17,024*" not in text
    assert "* best of its column   > recommended" in text


def test_a_single_case_is_not_best_of_anything() -> None:
    assert not re.search(r"\d\*", bench_text(BENCHES["one case"]))


def test_cold_cases_are_compared_among_themselves() -> None:
    bench = make_bench(
        make_row("jpeg", 0), make_row("lmdb", 0), *(make_row(f, 0, cold=True, images_per_s=s, resident_before=0.0021)
        for f, s in (("lmdb", 90.0), ("hdf5", 50.0)))
    )  # fmt: skip
    text = bench_text(bench)
    assert "7,200*" in text
    assert "90.0*" in text
    assert text.index("  warm page cache:") < text.index("7,200*") < text.index("  cold page cache:")
    assert "at most 0.2% of a file was in the page cache when a run began" in text


def test_colour_adds_nothing_but_colour() -> None:
    coloured = bench_text(BENCHES["everything"], colour=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == bench_text(BENCHES["everything"])
    assert re.search(r"\x1b\[1;32m *1,234,567\*\x1b\[0m", coloured)
    assert "\x1b[31mfailed: a worker" in coloured


def test_bars_are_as_long_as_speeds_and_fall_back_to_ascii() -> None:
    for encoding, full in (("utf-8", "█"), ("ascii", "#"), ("latin-1", "#"), ("cp437", "#"), ("no such thing", "#")):
        text = bench_text(make_bench(make_row("lmdb", 0), make_row("lmdb", 1, images_per_s=3600.0)), encoding=encoding)
        whole, half = (line_of(text, "speed", "lmdb", "dataloader", n).count(full) for n in "01")
        assert whole == 2 * half >= 10
        if full == "#":
            assert text.isascii()


def test_a_failed_case_says_why() -> None:
    lines = table(bench_text(BENCHES["all failed"]), "speed")
    assert lines[3].startswith("  lmdb    dataloader        0  failed: a worker was killed by signal 9")
    assert "reached 3 times" in " ".join(lines)
    assert "No recommendation: no case could be measured." in bench_text(BENCHES["all failed"])
    assert "memory, MB" not in bench_text(BENCHES["all failed"])


def test_file_names_cannot_control_the_terminal() -> None:
    assert all(line.isprintable() for line in bench_text(BENCHES["nasty"]).splitlines())
    bench_text(BENCHES["nasty"]).encode()


def test_the_verdict_in_words() -> None:
    verdict = bench_text(BENCHES["usual"]).rsplit("\n\n", 1)[1].replace("\n  ", " ").splitlines()
    assert verdict == [
        "Use lmdb with loader dataloader, num_workers=2: 19,152 images/s, 23.2 times the fastest jpeg case, "
        "315.0 MB of memory in all.",
        "The fastest, and no cheaper case comes within 5% of it.",
        "All 12,345 pictures: 2.4 GB on disk, about 27 s to convert, paid for within the first epoch.",
    ]


def test_what_conversion_costs() -> None:
    bench = BENCHES["usual"]
    assert bench.verdict is not None
    later = replace(bench.verdict, epochs_to_pay_back=3.44)
    assert "paid for after 3.44 epochs." in bench_text(replace(bench, verdict=later))
    never = replace(bench.verdict, epochs_to_pay_back=None)
    assert "2.4 GB on disk, about 27 s to convert.\n" in bench_text(replace(bench, verdict=never)) + "\n"
    pictures = replace(bench.verdict, row=bench.rows[2])
    assert bench_text(replace(bench, verdict=pictures)).endswith("There is nothing to convert.")
    sizes = table(bench_text(bench), "on disk, 2,000 pictures")
    assert sizes[1].split() == ["jpeg", "61.2", "MB", "the", "pictures", "themselves"]
    assert sizes[2].split(maxsplit=3)[3] == "converted in 4.3 s, 464 images/s"
    assert "was there" in bench_text(make_bench(make_row("lmdb", 0, convert_s=None)))


def test_a_sentence_explains_the_memory_columns() -> None:
    text = " ".join(bench_text(BENCHES["usual"]).split())
    assert "Look at total: what the kernel cannot take back from all processes together" in text
    assert "RSS counts the page cache of a mapped file in full in every process" in text


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ({"step_ms": 20.0}, "with a consumer that works 20 ms on each batch"),
        (
            {"step_matmul": 512, "step_ms": 0},
            "with a consumer that multiplies matrices on each batch (step_matmul 512)",
        ),
        ({"step_matmul": True}, "with a consumer that multiplies matrices on each batch"),
    ],
)
def test_a_consumer_has_a_table_of_its_own(options: dict[str, Any], title: str) -> None:
    line = line_of(bench_text(make_bench(settings=options)), title, "lmdb", "dataloader", "2")
    assert line.split()[4:] == ["315", "51%*", "299*", "19,152*"]
    assert "with a consumer" not in bench_text(BENCHES["usual"])


def test_csv_holds_every_value_of_every_row() -> None:
    for bench in BENCHES.values():
        text = bench_csv(bench)
        assert len(text.splitlines()) == len(bench.rows) + 1
        assert text.splitlines()[0] == ",".join(field.name for field in fields(Row))
        for read, row in zip(csv.DictReader(io.StringIO(text)), bench.rows, strict=True):
            assert read["images_per_s"] == ("" if row.images_per_s is None else str(row.images_per_s))
            assert tuple(map(float, read["images_per_s_runs"].split())) == row.images_per_s_runs
            assert read["num_workers"] == str(row.num_workers)
            assert bool(read["error"]) == bool(row.error)


# HTML


class Page(HTMLParser):
    """Checks that tags are closed in order, and gathers attributes and text."""

    VOID = ("meta", "source", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: bench_html(bench) for name, bench in BENCHES.items()}


every_page = pytest.mark.parametrize("name", BENCHES)


@every_page
def test_the_page_is_well_formed_and_needs_nothing_else(pages: dict[str, str], name: str) -> None:
    page = Page(pages[name])
    pages[name].encode()
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "base", "form", "a")
        assert not [key for key in attributes if key.startswith("on")]
        for key in ("src", "srcset", "href"):
            assert attributes.get(key, "data:").startswith(
                "data:image/svg+xml;base64,"[: len(attributes.get(key, "data:"))]
            )
    style = "".join(re.findall(r"<style>(.*?)</style>", pages[name], re.DOTALL))
    assert not re.search(r"url\(|@import|http", style)
    assert "default-src 'none'" in str(page.all("meta"))
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert all(image["alt"] for image in page.all("img"))


@every_page
def test_the_page_has_every_figure_of_the_text(pages: dict[str, str], name: str) -> None:
    text, shown = bench_text(BENCHES[name]), Page(pages[name]).text
    figures = {
        figure
        for title in ("speed", "memory, MB", "with a consumer", "on disk")
        for part in text.split("\n\n")
        if part.startswith(title)
        for figure in re.findall(r"\d[\d.,]*\d|\d", part)
    }
    assert not [figure for figure in figures if figure not in shown]
    assert bench_text(BENCHES[name]).rsplit("\n\n", 1)[1].split(":")[0] in shown


def test_the_page_marks_best_cells_and_the_recommended_case(pages: dict[str, str]) -> None:
    page = pages["usual"]
    assert page.count('<td class="best">19,152★</td>') == 1
    assert page.count("<tr class=chosen>") == page.count("(recommended)") == 1
    assert "lmdb, dataloader, 2 workers (recommended)" in page
    assert f"failed: {KILLED}".replace("'", "&#x27;") in pages["all failed"]


def test_what_others_wrote_is_text(pages: dict[str, str]) -> None:
    page = Page(pages["nasty"])
    assert not page.all("script")
    assert not [image for image in page.all("img") if image.get("src") == "x"]
    assert (
        page.text.count('<script>document.title="ran"</script>') >= 5
    )  # format (twice), error, note, machine, setting


def svgs(page: str) -> list[str]:
    return [base64.b64decode(each).decode() for each in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", page)]


@every_page
def test_plots_are_sound_and_the_same_each_time(pages: dict[str, str], name: str) -> None:
    drawn = svgs(pages[name])
    expected = {"all failed": 0, "interrupted at once": 0, "no memory": 2}.get(name, 6)
    assert len(drawn) == 2 * expected
    for svg in drawn:
        for element in ElementTree.fromstring(svg).iter():
            assert element.tag.rpartition("}")[2] not in ("script", "image", "metadata", "foreignObject")
            for key, value in element.attrib.items():
                if key.rpartition("}")[2] == "href":
                    assert value.startswith("#")
    if name in ("usual", "nasty"):
        assert bench_html(BENCHES[name]) == pages[name]


def test_plots_name_axes_units_and_lines() -> None:
    drawn = {plot.title: plot for plot in plots(BENCHES["usual"])}
    assert list(drawn) == ["Speed against workers", "Speed against disk size"] + [
        f"{name} against workers" for name in ("RSS", "PSS", "USS", "Total memory")
    ]
    for title, words in {
        "Speed against workers": ["images/s", "workers", "lmdb 19,152", "hdf5 17,024", "jpeg 825"],
        "Speed against disk size": ["images/s", "MB on disk", "lmdb", "hdf5", "jpeg"],
        "RSS against workers": ["MB, all processes", "workers", "lmdb 1,673", "jpeg 846"],
        "Total memory against workers": ["MB", "workers", "lmdb 315", "jpeg 351"],
    }.items():
        for svg, theme in ((drawn[title].light, LIGHT), (drawn[title].dark, DARK)):
            texts = ["".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter()]
            assert not [word for word in words if word not in texts]
            assert theme.background in svg
            assert set(re.findall(r": (#\w{6})", svg)) <= set(theme.colours)
            assert theme.lines[0] in svg
    assert "lmdb: 7,200 with 0, 13,176 with 1, 19,152 with 2" in drawn["Speed against workers"].alternative


def test_plots_leave_matplotlib_as_it_was() -> None:
    import matplotlib

    def parameters() -> list[tuple[str, Any]]:  # asking for the backend would choose one and load pyplot
        return [(name, matplotlib.rcParams[name]) for name in sorted(matplotlib.rcParams) if name != "backend"]

    with matplotlib.rc_context({"font.size": 17, "axes.facecolor": "red"}):
        before = parameters()
        [first, *_] = plots(BENCHES["one case"])
        assert parameters() == before
    assert first == plots(BENCHES["one case"])[0]
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for call in (require_matplotlib, lambda: bench_html(BENCHES["usual"])):
        with pytest.raises(PackshiftError, match=r"^[^\n]*needs matplotlib[^\n]*pip install 'packshift\[report\]'$"):
            call()


@given(st.lists(st.tuples(st.floats(0, 200), st.floats(1, 60)), max_size=8))
@settings(max_examples=50, deadline=None)
def test_names_of_lines_do_not_overlap(boxes: list[tuple[float, float]]) -> None:
    wanted, heights = [y for y, _ in boxes], [height for _, height in boxes]
    top = max(180.0, sum(heights))
    found = sorted(zip(_apart(wanted, heights, top), heights, strict=True))
    for (lower, one), (upper, other) in itertools.pairwise(found):
        assert upper - lower >= (one + other) / 2 - 1e-6
    assert all(height / 2 - 1e-6 <= y <= top - height / 2 + 1e-6 for y, height in found)


# How people with two kinds of cones see linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
SEEN_BY = {
    "all cones": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.052]],
    "deuteranopia": [[0.3673, 0.8606, -0.228], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ rgb.clip(0, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_are_legible_and_apart_for_the_colour_blind(theme: Theme) -> None:
    brightness = [linear(colour) @ [0.2126, 0.7152, 0.0722] + 0.05 for colour in (theme.background, *theme.lines)]
    for each in brightness[1:]:
        assert max(each, brightness[0]) / min(each, brightness[0]) >= 4.5  # WCAG AA
    for matrix in SEEN_BY.values():
        seen = [lab(np.array(matrix) @ linear(colour)) for colour in theme.lines]
        assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 20


# In a browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE, DESKTOP = (360, 800), (1280, 900)
MEASURE = """<script>
const foreign = [];
document.addEventListener("securitypolicyviolation", event => foreign.push(event.blockedURI));
addEventListener("load", () => {
  const images = [...document.images].map(image => ({
    natural: image.naturalWidth * image.naturalHeight, shown: image.getBoundingClientRect().width,
    dark: image.currentSrc === image.parentNode.querySelector("source").srcset}));
  for (const entry of performance.getEntriesByType("resource"))
    if (!entry.name.startsWith("data:")) foreign.push(entry.name);
  parent.postMessage(JSON.stringify({
    width: innerWidth, page: document.documentElement.scrollWidth, body: document.body.scrollWidth, images, foreign,
    ran: document.title === "ran",
    boxes: [...document.querySelectorAll(".scroll")].map(box => [box.clientWidth, box.scrollWidth]),
    smallest: Math.min(...[...document.querySelectorAll("p, td, th, dd, li")].map(
      each => parseFloat(getComputedStyle(each).fontSize))),
    background: getComputedStyle(document.body).backgroundColor, text: getComputedStyle(document.body).color}), "*");
});
</script>"""
# A browser's window may have a least width; a frame has none.
FRAME = """<!DOCTYPE html><title></title><script>
addEventListener("message", event => { document.title = btoa(event.data); });
</script><iframe src="page.html" style="border: 0; width: %dpx; height: %dpx"></iframe>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no headless browser: none of {', '.join(BROWSERS)} is on PATH")
    return found


def opened(browser: str, page: str, folder: Path, size: tuple[int, int], *, dark: bool) -> dict[str, Any]:
    """What a browser makes of a page, told by a script that only this copy has and allows."""
    page = page.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
    (folder / "page.html").write_text(page.replace("</head>", f"{MEASURE}</head>"))
    (folder / "frame.html").write_text(FRAME % size)
    command = [
        *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"),
        *(f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", "--virtual-time-budget=5000"),
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        (folder / "frame.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    title = re.search(r"<title>(.+?)</title>", done.stdout)
    assert title, done.stdout + done.stderr
    seen = json.loads(base64.b64decode(title[1]))
    assert seen["width"] == size[0]
    return seen


@pytest.mark.parametrize("name", ["usual", "everything", "nasty"])
def test_the_page_in_a_browser(pages: dict[str, str], name: str, browser: str, tmp_path: Path) -> None:
    light = opened(browser, pages[name], tmp_path, PHONE, dark=False)
    dark = opened(browser, pages[name], tmp_path, PHONE, dark=True)
    for seen in (light, dark):
        assert seen["page"] <= 360
        assert seen["body"] <= 360
        assert seen["boxes"][0][1] > seen["boxes"][0][0]
        assert len(seen["images"]) == 6
        assert all(image["natural"] > 0 and 250 < image["shown"] <= 360 for image in seen["images"])
        assert seen["smallest"] >= 12
        assert seen["foreign"] == []
        assert not seen["ran"]
    assert light["background"] == "rgb(255, 255, 255)"
    assert dark["background"] == "rgb(22, 25, 29)"
    assert light["text"] != dark["text"]
    assert not any(image["dark"] for image in light["images"])
    assert all(image["dark"] for image in dark["images"])


def test_the_page_on_a_wide_screen(pages: dict[str, str], browser: str, tmp_path: Path) -> None:
    seen = opened(browser, pages["usual"], tmp_path, DESKTOP, dark=False)
    assert seen["page"] <= 1280
    assert seen["boxes"][0][1] <= seen["boxes"][0][0]  # the table needs no scrolling

"""The report: its numbers are the store's, and a browser shows it without complaint."""

import csv
import json
import math
import re
import shutil
import statistics
import subprocess
from collections import Counter
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from tests.helpers.comparisons import TEXT, finished, parse

pytest.importorskip("matplotlib")

from forwardtune.errors import ExperimentError
from forwardtune.experiments import report
from forwardtune.experiments.report.charts import Chart, Series, charts
from forwardtune.experiments.report.drawing import png, svg
from forwardtune.experiments.report.tables import tables
from forwardtune.experiments.scoring import score
from forwardtune.experiments.store import Store

SPEC = (
    TEXT.replace("a test", "A <b>test</b> & more </script>")
    .replace("[1, 4]", "[1, 4, 3e4]")
    .replace("queries = 60", "queries = 240\ndescription = '$price'")
    .replace('method = "STP"', 'method = "MeZO"\nlr = [1e-4]\n\n[[methods]]\nmethod = "STP"')
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished comparison, its page, and its results read plainly from the files."""
    folder = tmp_path_factory.mktemp("report") / "store"
    spec, store = finished(folder, SPEC)
    page = report.write(score(spec, store), folder)
    results = [json.loads(file.read_text()) for file in (folder / "runs").glob("*.json")]
    return folder, page.read_text(), results


def expected_accuracy(results):
    """The cells of the accuracy table, worked out from the files without the package."""
    cells = {}
    for method in ("VS2P", "MeZO", "STP"):
        mine = [result for result in results if result["run"]["method"] == method]
        rates = {}
        for result in mine:
            loss = result["curve"]["train_loss"][-1]  # of four evaluations
            diverged = result["status"] == "diverged"
            rates.setdefault(result["run"]["lr"], []).append(float("inf") if diverged else loss)
        best = min(rates, key=lambda lr: (statistics.fmean(rates[lr]), lr))
        values = [100 * r["final"]["accuracy"] for r in mine if r["run"]["lr"] == best]
        name = "STP\N{PRIME}" if method == "STP" else method
        cells[name] = f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"
    return cells


class HTMLTags(HTMLParser):
    """How many elements of each name a page has."""

    def __init__(self, text):
        super().__init__()
        self.names = Counter()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.names[tag] += 1


class Tables(HTMLParser):
    """The tables of a page by the id of their section, and the attributes that would load something."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.section, self.cell, self.loads = {}, None, None, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href")]
        if tag == "section":
            self.section = self.tables.setdefault(dict(attributes)["id"], [])
        elif tag == "tr" and self.section is not None:
            self.section.append([])
        elif tag in ("td", "th") and self.section is not None:
            self.cell = ""

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data

    def handle_endtag(self, tag):
        if tag in ("td", "th") and self.cell is not None:
            self.section[-1].append(self.cell)
            self.cell = None
        elif tag == "section":
            self.section = None


def body_of(table):
    return {row[0]: row[1] for row in table[1:]}


def test_the_tables_hold_the_stores_numbers(made):
    folder, page, results = made
    assert len(results) == 10
    assert any(result["status"] == "diverged" for result in results)
    shown = Tables(page).tables
    assert body_of(shown["accuracy"]) == expected_accuracy(results)
    with open(folder / "report" / "runs.csv", newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert len(rows) == len(shown["runs"]) - 1 == 10
    for result in results:
        row = rows[result["id"]]
        assert float(row["accuracy"]) == result["final"]["accuracy"]
        assert float(row["train_loss"]) == result["final"]["train_loss"]
        assert int(row["queries"]) == result["queries"]
        assert row["torch_version"] == result["code"]["versions"]["torch"]
        cells = next(cells for cells in shown["runs"] if cells[-1] == result["id"])
        assert cells[7] == f"{100 * result['final']['accuracy']:.1f}"
    with open(folder / "report" / "accuracy.csv", newline="") as file:
        for row in csv.DictReader(file):
            mean = statistics.fmean(
                r["final"]["accuracy"]
                for r in results
                if r["run"]["method"] == row["method"].rstrip("\N{PRIME}") and r["run"]["lr"] == float(row["lr"])
            )
            assert float(row["mean"]) == mean


def figures_of(page):
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])


def test_the_charts_hold_the_stores_curves(made):
    folder, page, results = made
    names = [chart.name for chart in charts(score(parse(SPEC), Store(folder)).workloads[0])]
    assert names == ["loss", "accuracy", "sensitivity", "gamma", "sigma", "alpha"]
    figures = figures_of(page)
    assert list(figures) == [f"chart-{number}" for number in range(6)]
    lines = {line["name"]: line for line in figures["chart-0"]["series"]}
    assert len(lines) == 3
    for name, line in lines.items():
        method, lr = re.fullmatch(r"(\w+)\N{PRIME}?, lr (\S+)", name).groups()
        mine = [r for r in results if (r["run"]["method"], r["run"]["lr"]) == (method, float(lr))]
        means = [statistics.fmean(pair) for pair in zip(*(r["curve"]["train_loss"] for r in mine), strict=True)]
        assert line["y"] == pytest.approx(means, rel=1e-5)
        assert line["x"] == mine[0]["curve"]["queries"]


def place(axis, value):
    """Where a value is in a picture, as the page works it out."""
    value, low, high = (math.log(v) if axis["log"] else v for v in (value, axis["low"], axis["high"]))
    return axis["from"] + (axis["to"] - axis["from"]) * (value - low) / (high - low)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_values_are_shown_where_they_are_drawn(made, number):
    """Of a line in queries and loss, one in queries and per cent, and one in rates and loss."""
    _, page, _ = made
    chart = figures_of(page)[f"chart-{number}"]
    picture = re.search(f'<svg id="chart-{number}".*?</svg>', page)[0]
    for which, series in enumerate(chart["series"]):
        (path,) = re.findall(rf'<g data-series="{which}"><path d="M([^"z]*)"', picture)
        drawn = [tuple(map(float, point.split())) for point in path.split("L")]
        known = [(x, y) for x, y in zip(series["x"], series["y"], strict=True) if y is not None]
        there = [(place(chart["x"], x), place(chart["y"], y)) for x, y in known]
        assert len(drawn) == len(there) >= 1
        for point, other in zip(drawn, there, strict=True):
            assert math.dist(point, other) < 0.5


def test_the_page_is_small_and_the_same_every_time(made, tmp_path):
    folder, page, _ = made
    assert len(page) < 150_000
    shutil.copytree(folder, tmp_path / "again")
    assert report.write(score(parse(SPEC), Store(tmp_path / "again")), tmp_path / "again").read_text() == page
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids)) > 20
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', page)) < set(ids)


def test_names_are_no_markup_in_a_picture(tmp_path):
    name = "_</text><script>alert('$\\frac$')</script>&\""
    chart = Chart("c", name, name, name, (Series(name, "#000000", [1, 2], [0.5, 2.0]),), log_y=True)
    picture, values = svg(chart, "chart-0")
    assert values["series"][0]["name"] == name
    parts = list(ElementTree.fromstring(picture).iter())
    assert {part.tag for part in parts} <= {"svg", "g", "defs", "clipPath", "path", "rect", "text", "use"}
    assert [part.text for part in parts if part.tag == "text"].count(name) == 3  # both axes and the legend
    assert parts[0].attrib["aria-label"] == f"{name}: {name}"
    png(chart, tmp_path / "c.png")


@pytest.mark.parametrize("values", [[0.03, 40], [0.5, 5], [0.6, 1.4], [2.29, 2.31], [1e-7, 0.1], [3.0, 3.0]])
def test_a_logarithmic_axis_has_plain_numbers_on_it(values):
    picture, shown = svg(Chart("c", "", "", "", (Series("a", "#000000", [0, 1], values),), log_y=True), "key")
    low, high = shown["y"]["low"], shown["y"]["high"]
    texts = [part for part in ElementTree.fromstring(picture).iter("text") if part.text != "a"]
    ticks = {float(part.text): float(part.attrib["y"]) for part in texts if "end" in part.attrib["style"]}
    assert len(ticks) >= 3
    for tick, y in ticks.items():
        assert low <= tick <= high
        assert abs(y - place(shown["y"], tick)) < 5  # half a line of text


def test_the_page_loads_nothing_and_keeps_text_apart_from_markup(made):
    _, page, _ = made
    assert all(value.startswith("#") for value in Tables(page).loads)
    assert "default-src 'none'" in page
    assert "<h1>A &lt;b&gt;test&lt;/b&gt; &amp; more &lt;/script&gt;</h1>" in page
    assert "$price" in page


def test_what_strangers_wrote_into_a_store_stays_text(made, tmp_path):
    """Names in the spec, and everything in a result that is not a number."""
    folder, _, _ = made
    shutil.copytree(folder, tmp_path / "store")
    script = "<script>alert(1)</script>"
    for file in (tmp_path / "store" / "runs").glob("*.json"):
        result = json.loads(file.read_text())
        result["reason"] = result["title"] = result["code"]["commit"] = script
        result["code"]["versions"] = {"torch": script, "=1+1": "=1+1"}
        result["circumstances"]["host"] |= {"name": "=1+1", "cpu": script}
        result["device"] = result["data"]["note"] = script
        file.write_text(json.dumps(result))
    spec = SPEC.replace('method = "STP"', 'method = "STP"\nlabel = "=1+[a](b)`$x$&lt;"')
    spec = spec.replace('data = "digits"', 'name = "@_$^{ [a](b)"\ndata = "digits"')
    page = report.write(score(parse(spec), Store(tmp_path / "store")), tmp_path / "store").read_text()
    plain, hostile = (HTMLTags(text).names for text in (made[1], page))
    assert {name: count for name, count in hostile.items() if name in ("script", "b", "a", "img")} == {"script": 3}
    assert plain["script"] == 3
    assert page.count("&lt;script&gt;") > 10
    parts = tmp_path / "store" / "report"
    for file in parts.glob("*.csv"):
        with open(file, newline="") as content:
            cells = {cell for row in csv.reader(content) for cell in row}
        assert [cell for cell in cells if cell.startswith(("=", "+", "@"))] == []
        assert "'@_$^{ [a](b)" in cells
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse((parts / "tables.md").read_text())
    kinds = {child.type for token in tokens for child in [token, *(token.children or ())]}
    assert not kinds & {"html_inline", "html_block", "link_open", "image", "code_inline", "fence"}


def test_files_beside_the_page(made):
    folder, _, _ = made
    names = {file.name for file in (folder / "report").iterdir()}
    assert {"tables.md", "accuracy.csv", "loss.csv", "acceleration.csv", "differences.csv", "rates.csv"} < names
    pictures = [file for file in (folder / "report").iterdir() if file.suffix == ".png"]
    assert len(pictures) == 6
    for file in pictures:
        assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    markdown = (folder / "report" / "tables.md").read_text()
    assert "| method | digits-cnn |" in markdown
    assert "| over MeZO |" in markdown


def test_a_comparison_that_is_not_complete(made, tmp_path):
    """The seeds that are complete are told, or that there are none."""
    folder, _, results = made
    shutil.copytree(folder, tmp_path / "part")
    files = {file: json.loads(file.read_text())["run"] for file in (tmp_path / "part" / "runs").glob("*.json")}
    for file, run in files.items():
        if run["seed"] == 1:
            file.unlink()
    page = report.write(score(parse(SPEC), Store(tmp_path / "part")), tmp_path / "part").read_text()
    assert "5 runs of the comparison are missing." in page
    mine = [r for r in results if (r["run"]["method"], r["run"]["seed"]) == ("MeZO", 0)]
    assert body_of(Tables(page).tables["accuracy"])["MeZO"] == f"{100 * mine[0]['final']['accuracy']:.1f}"
    next(file for file, run in files.items() if run["seed"] == 0 and run["method"] == "VS2P").unlink()
    page = report.write(score(parse(SPEC), Store(tmp_path / "part")), tmp_path / "part").read_text()
    assert set(body_of(Tables(page).tables["accuracy"]).values()) == {"runs missing"}


def test_runs_that_were_not_made_alike(made, tmp_path):
    folder, page, _ = made
    assert "The runs were made with different" not in page
    shutil.copytree(folder, tmp_path / "mixed")
    file = next((tmp_path / "mixed" / "runs").glob("*.json"))
    result = json.loads(file.read_text())
    result["code"]["versions"] = {**result["code"]["versions"], "torch": "9.9", "other": "1.0"}
    file.write_text(json.dumps(result))
    page = report.write(score(parse(SPEC), Store(tmp_path / "mixed")), tmp_path / "mixed").read_text()
    assert "The runs were made with different versions of torch" in page
    assert "other_version" in (tmp_path / "mixed" / "report" / "runs.csv").read_text().splitlines()[0]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("forwardtune.experiments.report.document.find_spec", lambda name: None)
    with pytest.raises(
        ExperimentError, match=r"a report needs matplotlib; install it: pip install 'forwardtune\[report\]'"
    ):
        report.check_installed()


def chromium(page, *options):
    """What the browser makes of a page, and what it writes to its console."""
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=15000",
    ]
    done = subprocess.run([CHROMIUM, *flags, *options, page.as_uri()], capture_output=True, text=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_chromium
def test_in_a_browser(made, tmp_path):
    folder, _, results = made
    dom, console = chromium(folder / "report.html", "--dump-dom")
    assert console == []
    assert len(re.findall(r'<svg id="chart-\d" viewBox', dom)) == 6
    assert body_of(Tables(dom).tables["accuracy"]) == expected_accuracy(results)
    for size in ("1280,2400", "500,4000"):
        picture = tmp_path / "page.png"
        chromium(folder / "report.html", f"--window-size={size}", f"--screenshot={picture}")
        assert picture.stat().st_size > 50_000
    broken = tmp_path / "broken.html"
    broken.write_text("<script>undefinedFunction()</script>")
    assert chromium(broken, "--dump-dom")[1]  # so an error would have been seen


POINT = """<script>
  const box = document.getElementById("chart-0").getBoundingClientRect();
  const at = { clientX: box.x + 0.6 * box.width, clientY: box.y + 0.7 * box.height };
  document.getElementById("chart-0").dispatchEvent(new PointerEvent("pointermove", at));
</script>"""


@needs_chromium
def test_values_are_shown_under_the_pointer(made, tmp_path):
    _, page, _ = made
    (tmp_path / "pointed.html").write_text(page + POINT)
    dom, console = chromium(tmp_path / "pointed.html", "--dump-dom")
    assert console == []
    tip = re.search(r'<div class="tip"[^>]*>(.*?)</div>', dom)[1]
    lines = figures_of(page)["chart-0"]["series"]
    queries = lines[0]["x"][2]  # of four evaluations after the start
    assert tip.startswith(f"<b>queries: {queries}</b>")
    nearest = [min(range(5), key=lambda i: abs(line["x"][i] - queries)) for line in lines]
    told = [f"{line['name']}: {line['y'][i]:.4g}" for line, i in zip(lines, nearest, strict=True)]
    assert re.findall(r"<(?:span|strong)[^>]*>(.*?)</", tip) == told
    assert tip.count("<strong") == 1
    assert dom.count('class="faint"') == 4  # lines and bands of two of the three


def test_every_workload_has_its_tables_and_charts(made):
    folder, _, _ = made
    scores = score(parse(SPEC), Store(folder))
    assert list(tables(scores)) == ["accuracy", "loss", "acceleration", "differences", "cost", "rates"]
    for table in tables(scores).values():
        assert all(len(row) == len(table.header) for row in table.rows)
    assert [chart.name for chart in charts(scores.workloads[0])][:3] == ["loss", "accuracy", "sensitivity"]

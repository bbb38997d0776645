"""The report: its numbers are the store's, and a browser shows it without complaint."""

import csv
import json
import re
import shutil
import statistics
import subprocess
from html.parser import HTMLParser

import pytest

from tests.helpers.comparisons import TEXT, finished, parse

pytest.importorskip("plotly")
pytest.importorskip("matplotlib")

from forwardtune.errors import ExperimentError
from forwardtune.experiments import report
from forwardtune.experiments.report.charts import charts, log_ticks
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


def test_the_charts_hold_the_stores_curves(made):
    _, page, results = made
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])
    lines = {line["name"]: line for line in figures["digits-cnn-loss"]["data"] if line.get("name")}
    assert len(lines) == 3
    for name, line in lines.items():
        method, lr = re.fullmatch(r"(\w+)\N{PRIME}?, lr (\S+)", name).groups()
        mine = [r for r in results if (r["run"]["method"], r["run"]["lr"]) == (method, float(lr))]
        means = [statistics.fmean(pair) for pair in zip(*(r["curve"]["train_loss"] for r in mine), strict=True)]
        assert line["y"] == pytest.approx(means)
        assert line["x"] == mine[0]["curve"]["queries"]
    assert {key.removeprefix("digits-cnn-") for key in figures} == {
        "loss",
        "accuracy",
        "sensitivity",
        "gamma",
        "sigma",
        "alpha",
    }


def test_the_page_loads_nothing_and_keeps_text_apart_from_markup(made):
    _, page, _ = made
    before_library = page[: page.index("plotly.js v")]
    assert Tables(before_library).loads == []
    assert "<h1>A &lt;b&gt;test&lt;/b&gt; &amp; more &lt;/script&gt;</h1>" in page
    assert "$price" in page


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
        ExperimentError, match=r"a report needs plotly; install it: pip install 'forwardtune\[report\]'"
    ):
        report.check_installed()


def test_log_ticks():
    assert [t for t in log_ticks([0.03, 40]) if 0.03 <= t <= 40] == [0.1, 1, 10]
    assert [t for t in log_ticks([0.5, 5]) if 0.5 <= t <= 5] == [0.5, 1, 2, 5]
    assert [t for t in log_ticks([0.6, 1.4]) if 0.6 <= t <= 1.4] == [0.6, 0.8, 1]
    assert log_ticks([2.29, 2.31]) is None  # so short that it is drawn linear
    assert log_ticks([]) is None


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
    assert len(re.findall(r'class="main-svg"', dom)) >= 6
    assert body_of(Tables(dom).tables["accuracy"]) == expected_accuracy(results)
    for size in ("1280,2400", "500,4000"):
        picture = tmp_path / "page.png"
        chromium(folder / "report.html", f"--window-size={size}", f"--screenshot={picture}")
        assert picture.stat().st_size > 50_000
    broken = tmp_path / "broken.html"
    broken.write_text("<script>undefinedFunction()</script>")
    assert chromium(broken, "--dump-dom")[1]  # so an error would have been seen


def test_every_workload_has_its_tables_and_charts(made):
    folder, _, _ = made
    scores = score(parse(SPEC), Store(folder))
    assert list(tables(scores)) == ["accuracy", "loss", "acceleration", "differences", "rates"]
    for table in tables(scores).values():
        assert all(len(row) == len(table.header) for row in table.rows)
    assert [chart.name for chart in charts(scores.workloads[0])][:3] == ["loss", "accuracy", "sensitivity"]

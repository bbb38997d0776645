"""The report: one HTML file that needs nothing else, and beside it the same charts as PNG, the same tables as files."""

from __future__ import annotations

import html
import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from string import Template

from forwardtune.errors import ExperimentError
from forwardtune.experiments.report.charts import charts
from forwardtune.experiments.report.drawing import png, svg
from forwardtune.experiments.report.tables import Table, runs_table, tables
from forwardtune.experiments.result import Json, RunResult
from forwardtune.experiments.scoring import ComparisonScore
from forwardtune.experiments.summary import count, sentence
from forwardtune.files import replace_file, translated, write_text
from forwardtune.markup import markdown


def check_installed() -> None:
    """Refuses early where a report could not be made later."""
    if find_spec("matplotlib") is None:
        raise ExperimentError("a report needs matplotlib; install it: pip install 'forwardtune[report]'")


def write(scores: ComparisonScore, folder: Path | str) -> Path:
    """Makes `folder`/report.html and the folder `report`; the path of the page."""
    check_installed()
    folder = Path(folder)
    parts = folder / "report"
    every_table, runs = tables(scores), runs_table(scores.workloads)
    page = folder / "report.html"
    with translated(ExperimentError, f"the report in {folder} cannot be written"):
        parts.mkdir(parents=True, exist_ok=True)
        for table in [*every_table.values(), runs]:
            write_text(parts / f"{table.name}.csv", table.csv())
        write_text(parts / "tables.md", _markdown(scores, every_table))
        for workload in scores.workloads:
            for chart in charts(workload):
                file = parts / f"{workload.workload.name}-{chart.name}.png"
                replace_file(file, partial(png, chart))
        write_text(page, _page(scores, every_table, runs))
    return page


def _markdown(scores: ComparisonScore, every_table: dict[str, Table]) -> str:
    spec = scores.spec
    verdicts = "\n".join(f"- {markdown(sentence(workload))}" for workload in scores.workloads)
    blocks = [
        f"## {markdown(table.title)}\n\n{table.markdown()}\n\n{markdown(table.note)}\n"
        for table in every_table.values()
    ]
    return "\n".join([f"# {markdown(spec.title)}\n", markdown(spec.description), "", verdicts, "", *blocks])


def _page(scores: ComparisonScore, every_table: dict[str, Table], runs: Table) -> str:
    template, script = ((Path(__file__).parent / name).read_text("utf-8") for name in ("page.html", "page.js"))
    figures: Json = {}
    sections = []
    for workload in scores.workloads:
        boxes = []
        for chart in charts(workload):
            key = f"chart-{len(figures)}"
            picture, figures[key] = svg(chart, key)
            boxes.append(
                f"<figure><figcaption>{_safe(chart.title)}</figcaption>{picture}<p>{_safe(chart.note)}</p></figure>"
            )
        sections.append(f'<h2>{_safe(workload.workload.name)}</h2><div class="charts">{"".join(boxes)}</div>')
    results = scores.results
    notes = [f"{count(scores.missing, 'run')} of the comparison are missing."] if scores.missing else []
    notes += _mixtures(results)
    notes += sorted({result.data.note for result in results if result.data.note})
    return Template(template).substitute(
        title=_safe(scores.spec.title),
        description=_safe(scores.spec.description),
        notes="".join(f'<p class="note">{_safe(note)}</p>' for note in notes),
        verdicts="".join(f"<li>{_safe(sentence(workload))}</li>" for workload in scores.workloads),
        tables="".join(_table(table) for name, table in every_table.items() if name != "rates"),
        sections="".join(sections),
        rates=_table(every_table["rates"]),
        runs=_table(runs),
        spec=_safe(scores.spec.text),
        results=_json([result.summary() for result in results]),
        figures=_json(figures),
        script=script,
    )


def _mixtures(results: list[RunResult]) -> list[str]:
    """Runs that are compared should have been made alike."""
    kinds: dict[str, set[object]] = {
        "commits of forwardtune": {(result.code.commit, result.code.dirty) for result in results},
        "versions of torch": {result.code.versions["torch"] for result in results},
        "devices": {result.device for result in results},
        "numbers of threads": {result.threads for result in results},
    }
    mixed = [what for what, kind in kinds.items() if len(kind) > 1]
    return [f"The runs were made with different {what}; see the table of runs." for what in mixed]


def _table(table: Table) -> str:
    head = "".join(f"<th>{_safe(cell)}</th>" for cell in table.header)
    body = "".join("<tr>" + "".join(f"<td>{_safe(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    note = f"<p>{_safe(table.note)}</p>" if table.note else ""
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<section id="{table.name}"><h3>{_safe(table.title)}</h3><div class="wide">{inner}</div>{note}</section>'


def _safe(text: str) -> str:
    return html.escape(text)


def _json(content: object) -> str:
    """For a script element: nothing in it can end the element."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")

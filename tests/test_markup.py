"""Text of strangers in files for others: it stays text, for a spreadsheet and for a reader of Markdown."""

import csv
import io
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from forwardtune.experiments.plan import Run
from forwardtune.experiments.report.tables import as_csv
from forwardtune.experiments.report.tables import markdown as table_of
from forwardtune.experiments.result import Curve
from forwardtune.experiments.spec import Method
from forwardtune.finetuning.card import card
from forwardtune.finetuning.kept import Kept
from forwardtune.markup import FORMULA, code_block, csv_cell, markdown
from forwardtune.tasks import Scores, TextWorkload
from tests.helpers.comparisons import made_up

PROSE = {"paragraph_open", "paragraph_close", "inline", "heading_open", "heading_close", "text", "text_special"}
EMPHASIS = {f"{kind}_{end}" for kind in ("em", "strong") for end in ("open", "close")}
TABLE = {f"{part}_{end}" for part in ("table", "thead", "tbody", "tr", "th", "td") for end in ("open", "close")}
HOSTILE = (
    "a <script>alert(1)</script> ![x](http://e.vil/a.png) [x]: http://e.vil | `a` \\` <javascript:a> &lt;b>\n\n```\n# h"
)


def kinds_of(source):
    """The kinds of all tokens that CommonMark with tables sees, HTML among them."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(source)
    return [child.type for token in tokens for child in [token, *(token.children or ())]]


def test_the_oracle_sees_what_it_should():
    assert {"html_inline", "image", "code_inline", "fence"} <= set(kinds_of(HOSTILE))


TEXTS = st.text(st.sampled_from(list("ab<>&[](){}:!|`\\*_~-/=\"' \n#")), max_size=30)


@settings(max_examples=100, deadline=None, derandomize=True)
@example(HOSTILE)
@given(TEXTS)
def test_text_is_prose_in_a_heading_and_one_cell_in_a_table(text):
    assert set(kinds_of(f"# {markdown(text)}")) <= PROSE | EMPHASIS
    kinds = kinds_of(table_of(["a", text], [[text, "b"]]))
    assert set(kinds) <= PROSE | EMPHASIS | TABLE
    assert (kinds.count("th_open"), kinds.count("td_open")) == (2, 2)


def test_numbers_and_intervals_look_in_markdown_as_they_do_elsewhere():
    assert markdown("2.5 [2.2, 2.9] -> **VS2P**, f1 (%)") == "2.5 [2.2, 2.9] -&gt; **VS2P**, f1 (%)"


@pytest.mark.parametrize("text", ["a\n```\n<script>", "````", "`", ""])
def test_nothing_ends_a_block_of_code(text):
    assert kinds_of(code_block(text)) == ["fence"]


@pytest.mark.parametrize("begin", FORMULA)
def test_a_spreadsheet_finds_no_formula_in_a_csv(begin):
    text = f'{begin}HYPERLINK("http://e.vil")'
    rows = list(
        csv.reader(io.StringIO(as_csv([{"text": text, text: "-0.5", "c": -0.5, "d": None}, {"text": "a = b"}])))
    )
    assert rows == [["text", f"'{text}", "c", "d"], [f"'{text}", "-0.5", "-0.5", ""], ["a = b", "", "", ""]]


@pytest.mark.parametrize("number", ["-0.5", "+3", "-1e-05", "-.5", "-2."])
def test_numbers_stay_numbers(number):
    assert csv_cell(number) == number
    assert csv_cell(float(number)) == float(number)
    assert csv_cell(f"{number}+A1") == f"'{number}+A1"
    assert csv_cell(f"{number}\n") == f"'{number}\n"


def test_a_model_card_is_prose_whatever_the_names_are():
    workload = TextWorkload(
        name="a [b](c) `d` & e",
        data="files",
        network="transformer",
        weights=f"models/{HOSTILE.replace('/', '')}\n```\n",
        batch=4,
        seeds=(0,),
        queries=80,
        train="train.csv",
        text=("text",),
        label="label",
    )
    scores = Scores(1.0, 1.0, {"accuracy": 0.5})
    task = SimpleNamespace(
        workload=workload,
        metrics=("accuracy",),
        tests=10,
        language=SimpleNamespace(path=workload.weights, config=SimpleNamespace(), setup_name="prompt"),
        template="{text} <b>It</b> [is](x)",
        setup_words=("`good`", "</p><script>"),
    )
    run = Run(workload, Method("VS2P", "VS2P", (1.0,), {}), 1.0, 0, "cosine")
    result = made_up(Curve((0, 80), (scores, scores)))
    _, front, body = card(run, task, result, Kept(80, scores, True)).split("---\n", 2)
    assert front.splitlines()[1].startswith('base_model: "models/')
    kinds = kinds_of(body)
    assert set(kinds) <= PROSE | TABLE | {"fence", "code_inline", "softbreak"}
    assert kinds.count("fence") == 2
    assert kinds.count("code_inline") == 2  # of the card's own

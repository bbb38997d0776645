"""Text of users and files in formats where text can be more than text: Markdown, and cells of CSV."""

from __future__ import annotations

import html
import re

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""What a cell begins with that spreadsheets take for a formula, or skip before one."""


def markdown(text: str) -> str:
    """On one line, without HTML, links, code, or ends of a table's cell; emphasis stays.

    >>> markdown("a | b <script>")
    'a \\\\| b &lt;script&gt;'
    """
    flat = html.escape(" ".join(text.split()), quote=False).replace("\\", "\\\\")
    return re.sub(r"[`|]|\](?=[(\[:])", r"\\\g<0>", flat)


def code_block(text: str) -> str:
    """A block of code in Markdown, which nothing in the text ends."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def csv_cell(value: object) -> object:
    """A text that a spreadsheet would take for a formula gets an apostrophe before it; numbers stay.

    >>> csv_cell("=1+1"), csv_cell("-0.5"), csv_cell(-0.5)
    ("'=1+1", '-0.5', -0.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) and not _is_number(value) else value


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII) is not None

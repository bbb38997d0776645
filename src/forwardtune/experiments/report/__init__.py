"""Scores as a page for the browser, pictures and tables."""

from forwardtune.experiments.report.document import check_installed, write

__all__ = ["check_installed", "write"]

"""The `forwardtune` command."""

from forwardtune.cli.main import app, main

__all__ = ["app", "main"]

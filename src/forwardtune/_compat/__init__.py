"""Third-party packages for which a plain import is not enough: one shim per package."""

from forwardtune.errors import ExperimentError


def check_transformers() -> None:
    """Imports transformers now, which takes seconds, or says how to install it."""
    try:
        from forwardtune._compat import transformers  # noqa: F401
    except ImportError as error:
        raise ExperimentError(str(error)) from None

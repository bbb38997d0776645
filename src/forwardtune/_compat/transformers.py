"""transformers, also next to a torchvision that cannot be imported; if it is missing, says how to install it."""

from __future__ import annotations

from forwardtune._compat.torchvision import make_importable

make_importable()
try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"this needs transformers ({error}); install it: pip install 'forwardtune[huggingface]'"
    ) from error

__all__ = ["transformers"]

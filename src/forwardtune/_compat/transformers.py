"""transformers, also next to a torchvision that cannot be imported; if it is missing, says how to install it."""

from __future__ import annotations

import logging

from forwardtune._compat.torchvision import make_importable

# bitsandbytes, which transformers and peft import where it is installed, warns of an optional kernel that we never use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
make_importable()
try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"this needs transformers ({error}); install it: pip install 'forwardtune[huggingface]'"
    ) from error

__all__ = ["transformers"]

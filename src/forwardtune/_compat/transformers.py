"""transformers, also next to a torchvision that cannot be imported; if it is missing, says how to install it."""

from __future__ import annotations

import logging

from forwardtune._compat.torchvision import make_importable

# bitsandbytes, which transformers and peft import where it is installed, warns of an optional kernel that we never use,
# and at every call of an 8-bit layer of a cast to float16.
for _name in ("bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions"):
    logging.getLogger(_name).setLevel(logging.ERROR)
make_importable()
try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"this needs transformers ({error}); install it: pip install 'forwardtune[huggingface]'"
    ) from error

__all__ = ["transformers"]

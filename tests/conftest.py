"""Settings that all tests share."""

import os
import signal

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: its kernels then run on CPU tensors

import torch
from hypothesis import settings

torch.set_num_threads(1)  # two test workers share two cores
settings.register_profile("seeded", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("seeded")

# A process that a shell starts in the background ignores Ctrl-C, and so would Python and all processes that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

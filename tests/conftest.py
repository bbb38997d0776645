"""Settings that all tests share."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: its kernels then run on CPU tensors

import torch
from hypothesis import settings

torch.set_num_threads(1)  # two test workers share two cores
settings.register_profile("seeded", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("seeded")

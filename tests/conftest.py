"""Hypothesis without deadlines and with the same examples in every run; one thread, since all tests are small."""

import torch
from hypothesis import settings

settings.register_profile("fullcp", deadline=None, derandomize=True)
settings.load_profile("fullcp")
torch.set_num_threads(1)

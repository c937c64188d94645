"""Shared by all tests: one torch thread, so that tests that run side by side do not wait for each other."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

"""How many threads PyTorch may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from edgefl.allocator import keep_memory


@contextmanager
def one_thread() -> Iterator[None]:
    """torch with one thread: two wait for each other at every small operator, and last bits may differ.

    And a process that was forked from one that had trained with two would wait without end for the second.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_memory()
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""What pytest is not to import, and fixtures that several files use."""

from __future__ import annotations

import pytest

collect_ignore = ["slurm_probe.py"]  # a program that only runs as a job's ranks


@pytest.fixture(scope="module")
def one_thread():
    """Small tensors on one thread: more threads only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

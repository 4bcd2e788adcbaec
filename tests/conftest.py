"""What holds for all tests: which file is no test, and how many threads compute."""

from __future__ import annotations

import os

# Tensors of tests are small: more threads only wait for each other, and two tests run at a time.
# Torch and numpy read it when they are imported, in processes that a test starts as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")

collect_ignore = ["slurm_probe.py"]  # a program that only runs as a job's ranks

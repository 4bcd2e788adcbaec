"""What pytest is not to import: a program that only runs as a job's ranks."""

collect_ignore = ["slurm_probe.py"]

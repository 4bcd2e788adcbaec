"""Running and measuring: the demo, benchmarks, their data and result files."""

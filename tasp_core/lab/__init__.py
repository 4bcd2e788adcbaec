"""Running and measuring: benchmarks, training runs, emulated networks and devices, the demo, doctor."""

"""What OptiGPU measures of itself: repeatability, fidelity, false alarms. Each is a program with `--help`."""

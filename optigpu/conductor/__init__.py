"""Measures a job: starts measuring processes, monitors the host, computes results and verdicts. Loads no torch."""

"""Measures a job: starts the measuring processes, monitors the host, judges the results."""

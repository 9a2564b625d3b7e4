"""Measures a job: starts measuring processes, watches the host meanwhile, judges what they measured."""

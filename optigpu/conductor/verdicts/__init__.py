"""Verdicts: what disturbed a measurement, and whether its result is valid."""

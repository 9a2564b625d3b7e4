"""Intervals, comparisons and drift, from samples alone."""

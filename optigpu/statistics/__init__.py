"""Intervals, comparisons and drift, computed from samples and their summaries."""

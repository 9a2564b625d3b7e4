"""Statistics of samples: intervals, comparisons and drift."""

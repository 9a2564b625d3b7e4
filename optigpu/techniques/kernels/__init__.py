"""Layer 2: one kernel instead of many. One file for each technique."""

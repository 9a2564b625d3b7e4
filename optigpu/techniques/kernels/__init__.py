"""Layer 2: one kernel instead of many. A module or a package for each technique."""

"""Layer 2: one kernel instead of many. A file or a package for each technique."""

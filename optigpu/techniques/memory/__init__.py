"""Layer 3: what is kept, and where. A module or a package for each technique."""

"""Layer 4: the whole step as one graph. A module or a package for each technique."""

"""Layer 4: the whole step as one graph. A file or a package for each technique."""

"""Layer 4: the whole step as one graph. One file for each technique."""

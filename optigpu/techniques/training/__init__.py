"""Training: the same steps in less time or memory. A module or a package for each technique."""

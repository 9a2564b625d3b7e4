"""Layer 1: fewer bits for each weight. A module or a package for each technique."""

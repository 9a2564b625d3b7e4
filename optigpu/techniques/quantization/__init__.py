"""Layer 1: fewer bits for each weight. A file or a package for each technique."""

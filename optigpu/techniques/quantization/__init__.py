"""Layer 1: fewer bits for each weight. One file for each technique."""

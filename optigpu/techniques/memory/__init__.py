"""Layer 3: what is kept, and where. One file for each technique."""

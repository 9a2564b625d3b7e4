"""Layer 3: what is kept, and where. A file or a package for each technique."""

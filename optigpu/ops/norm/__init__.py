"""Norms fused with the addition before them."""

"""Activations fused with the bias before them."""

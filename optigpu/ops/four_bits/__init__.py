"""Quantization of matrices to 4-bit numbers and scales."""

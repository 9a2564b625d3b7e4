"""The ranges of the integers that weights and activations are quantized to. Loads no torch."""

INT8_LARGEST = 127
"""Symmetric: -128 is not used."""
INT4_LEAST, INT4_LARGEST = -8, 7
"""The range of 4-bit numbers once INT4_ZERO is subtracted."""
INT4_ZERO = 8
"""The stored 4-bit number, from 0 to 15, that represents zero (plus the offset of its group)."""

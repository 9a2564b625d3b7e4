"""The uneven values that numbers stand for in the kinds `w4k` and `w3k`. Loads no torch."""

SIXTEEN = (-64, -47, -37, -29, -22, -15, -9, -3, 3, 9, 15, 22, 29, 36, 45, 56)
EIGHT = (-64, -38, -22, -8, 5, 18, 33, 53)
"""Those that leave normally distributed weights in groups of 64 the least error (docs/decisions/0050-uneven-values.md).

They are denser where weights are. One end lies further out than the other: a group's largest weight gets the further
one, whatever its sign, because a scale has a sign. With 64 added they have 7 bits, and the sum of two of their products
with 8-bit activations has 16: AVX2 adds two products in 16 bits.
"""
MOVED = {8: 7, 16: 3}
"""What is added to all values of a group whose scale is an odd multiple of its unit, by their count: about half a step.

So a group has the better of two grids in the same bytes.
"""
FURTHEST = -64
REACH = 1.1
"""How much further than a group's largest weight its scale may reach."""

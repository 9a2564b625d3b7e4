"""The uneven values that numbers stand for in the kinds `w4k` and `w3k`. Loads no torch."""

SIXTEEN = (-127, -94, -73, -57, -43, -30, -18, -6, 6, 18, 30, 43, 57, 72, 90, 112)
EIGHT = (-127, -76, -43, -16, 9, 35, 65, 105)
"""Those that leave normally distributed weights in groups of 64 the least error: `python -m benchmarks.grids --normal`.

They are denser where weights are. One end lies further out than the other: a group's largest weight gets the further
one, whatever its sign, because a scale has a sign.
"""
FURTHEST = -127
REACH = 1.1
"""How much further than a group's largest weight its scale may reach."""

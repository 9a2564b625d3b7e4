"""Which 4-bit numbers and scales stand for a matrix of weights."""

"""What runs in the processes that the conductor starts: a replicate of a variant, or the measurement of peak rates."""

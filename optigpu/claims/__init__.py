"""Published figures: what they claim, whether it is possible, and what was measured on the same hardware."""

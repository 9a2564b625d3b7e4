"""Replacing parts of a loaded torch model. Techniques call it from their hooks."""

"""A model reference -> a loaded torch model, and what can be read of one. Imports torch."""

"""Loads torch models from references, and reads facts of a loaded model. Imports torch."""

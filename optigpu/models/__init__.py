"""Models: references, facts that are known before a model is loaded, and loading."""

"""Models: a reference, what can be known of it without loading it, and how it is loaded."""

"""Whether a result counts: what disturbed it, and what that means."""

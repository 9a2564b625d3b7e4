"""Whether a result is valid: what disturbed it, and the reasons and warnings that follow."""

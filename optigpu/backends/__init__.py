"""The backends, one folder each: what executes a variant inside the measuring process."""

"""A decoder divided among processes of one machine; this one is rank 0 and announces each pass to the others."""

"""A gate: is one state of something worse than another? Both run by turns on one machine until that can be said."""

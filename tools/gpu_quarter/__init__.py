"""A quarter of an hour on a card: one command that runs what must be measured there, the most valuable first."""

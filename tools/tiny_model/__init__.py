"""How `bundled:tiny` is made: its text, its training, what it is compared with, and its card."""

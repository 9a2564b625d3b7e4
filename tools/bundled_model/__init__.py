"""How the bundled models are made: their text, their training, what they are compared with, and their cards."""

"""Files of other tools that measure models and servers: which of their figures are which of ours."""

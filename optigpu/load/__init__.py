"""Requests that arrive at an engine over time: when they arrive, how they are served, and what comes of it."""

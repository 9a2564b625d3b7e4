"""Measuring processes: starts them, keeps as many resident as fit into memory, and measures them in turns."""

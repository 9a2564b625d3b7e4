"""Measuring processes: started side by side, asked for rounds, ended."""

"""A port without a board: seeded latencies and power, and seeded faults. The core that runs on it is the real one.

It runs on CPython alone. Its reports say `simulator` and rank nowhere.
"""

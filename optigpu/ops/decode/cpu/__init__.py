"""The decoder in C++, for CPUs."""

"""The programs of the processes that the conductor starts."""

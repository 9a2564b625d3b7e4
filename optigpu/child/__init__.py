"""What runs in the processes that the conductor starts."""

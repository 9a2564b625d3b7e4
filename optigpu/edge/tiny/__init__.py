"""MLPerf Tiny's serial protocol, the runner's side: drives, times and judges a device as the open runner does."""

"""MLPerf Tiny's serial protocol, the device's side: its open runner can drive the same device as the agent."""

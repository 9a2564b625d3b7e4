"""The HTTP service: post jobs, follow them, read results and the leaderboard. Loads no torch."""

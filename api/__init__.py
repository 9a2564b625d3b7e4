"""The HTTP service: what it takes to post jobs, follow them and read the leaderboard. Loads no torch."""

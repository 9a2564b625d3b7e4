"""The HTTP service: posts jobs, follows them and shows the leaderboard. Loads no torch."""

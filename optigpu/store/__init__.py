"""The results database, PostgreSQL or a SQLite file: tables, queue and leases, results, leaderboard."""

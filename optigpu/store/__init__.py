"""The results database: tables, the job state machine, the leaderboard query. PostgreSQL or a SQLite file."""

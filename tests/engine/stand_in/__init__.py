"""Stand-ins for libraries that are not installed here."""

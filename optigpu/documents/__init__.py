"""What is stored and shown: results, events, and what the service answers with."""

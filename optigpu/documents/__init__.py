"""Documents that are stored and shown: results, events, and the answers of the service."""

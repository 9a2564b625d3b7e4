"""What is stored and shown: results with their facts, events, and the service's views."""

"""A fleet of simulated devices against a service, and what became of every report."""

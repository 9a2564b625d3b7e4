"""What is asked for, and what it came to: spec, plan, attribution, replay."""

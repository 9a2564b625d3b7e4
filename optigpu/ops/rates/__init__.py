"""How fast a CPU reads, copies and multiplies in loops of our own."""

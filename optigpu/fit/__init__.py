"""What a stack needs of a machine's memory, predicted from shapes: which models fit, at which context and batch."""

"""Training on PyTorch: how a step is arranged, run, timed, counted, and changed by the stack."""

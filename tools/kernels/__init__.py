"""The package's Triton kernels, compiled ahead for GPUs that are not here, and what each takes of them."""

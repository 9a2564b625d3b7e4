"""The decoder in Triton, for NVIDIA GPUs."""

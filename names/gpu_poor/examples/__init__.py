"""Examples of gpu_poor."""

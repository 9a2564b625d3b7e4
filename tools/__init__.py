"""Programs that make what the package holds; nobody who uses OptiGPU needs them."""

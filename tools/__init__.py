"""Programs for the development of OptiGPU; its users do not need them."""

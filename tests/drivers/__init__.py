"""A driver library for a GPU that is not there, so that the real NVML bindings run on any machine."""

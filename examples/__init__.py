"""Programs that use OptiGPU as anybody could: over HTTP, or as a library."""

"""Programs that use OptiGPU over HTTP or as a library."""

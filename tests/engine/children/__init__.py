"""Small real programs that speak the measuring process's protocol, well and badly."""

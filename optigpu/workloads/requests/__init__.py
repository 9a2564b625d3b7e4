"""The requests that several workloads share; the workloads do not import each other."""

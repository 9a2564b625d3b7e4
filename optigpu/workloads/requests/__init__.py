"""The requests that several workloads share; the workloads themselves do not know each other."""

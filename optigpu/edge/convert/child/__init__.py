"""Programs that run in processes of their own, in a Python that may have nothing of OptiGPU but this folder. `build`
imports TensorFlow and `evaluate` the two interpreters; neither runs in the process that asked."""

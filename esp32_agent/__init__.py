"""The agent of an edge device: it measures a model on the board and reports to an OptiGPU service.

`core` decides and computes, on integers; `port` touches the machine. Both run on MicroPython and on CPython, and import
nothing of OptiGPU's other packages.
"""

VERSION = "0.1.0"

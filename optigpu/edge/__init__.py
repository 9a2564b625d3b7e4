"""Microcontrollers: models converted, judged against boards and predicted; devices' codes, signatures and reports.
Loads no TensorFlow."""

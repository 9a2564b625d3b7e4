"""Microcontrollers: models converted, judged against boards and predicted. Loads no TensorFlow."""

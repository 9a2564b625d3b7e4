"""Models for microcontrollers: converted, read, judged against boards, and predicted. Loads no TensorFlow."""

"""Writes mobilenet_int8.tflite, MobileNetV2 for 224x224 pixels in INT8, as `optigpu convert` does; takes its flags."""

import sys

from optigpu.cli import main

FLAGS = ("--model", "mobilenet_v2", "--name", "mobilenet_int8", "--output", ".", "--allow-random-calibration")

main(["convert", *FLAGS, *sys.argv[1:]])

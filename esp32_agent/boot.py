"""What an ESP32-S3 does before main.py: the highest clock, by which latencies are compared, and no radio yet."""

import machine
import network

machine.freq(240_000_000)
network.WLAN(network.STA_IF).active(False)

"""The time of an NTP server, under CPython or MicroPython: python ask_time.py PORT TIMEOUT_S."""

import os
import sys

from esp32_agent.port import ntp
from esp32_agent.port.base import Clock

if sys.implementation.name == "micropython":
    from esp32_agent.port.micropython.clock import BoardClock

    own: Clock = BoardClock()
else:
    from esp32_agent.port.host.clock import HostClock

    own = HostClock()

try:
    print(ntp.ask("127.0.0.1", int(sys.argv[1]), own, os.urandom(8), int(sys.argv[2])))
except OSError:
    print("OSError")

"""The time of an NTP server under CPython or MicroPython: python ask_time.py PORT TIMEOUT_S; prints microseconds or None."""

import os
import sys

from esp32_agent.port import ntp

if sys.implementation.name == "micropython":
    from esp32_agent.port.micropython.clock import BoardClock as OwnClock
else:
    from esp32_agent.port.host.clock import HostClock as OwnClock

try:
    print(ntp.ask("127.0.0.1", int(sys.argv[1]), OwnClock(), os.urandom(8), int(sys.argv[2])))
except OSError:
    print("OSError")

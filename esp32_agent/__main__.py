"""python -m esp32_agent --config config.json [--runs N]: the agent under CPython, and under MicroPython's unix port."""

import sys

from esp32_agent.main import main

try:
    sys.exit(main(sys.argv[1:]))
except KeyboardInterrupt:
    sys.exit(0)

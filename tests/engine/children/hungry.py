"""Joins the control group whose `cgroup.procs` is its argument, and takes memory until the kernel kills it."""

import os
import sys
from pathlib import Path

from tests.engine.children import talk

talk.hear()
Path(sys.argv[1]).write_text(str(os.getpid()))
taken = []
while True:
    taken.append(bytearray(os.urandom(2**20)))

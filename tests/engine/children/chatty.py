"""Prints and answers more than any pipe holds, before it reads a word."""

import sys

from tests.engine.children import talk

for _ in range(64):
    sys.stderr.write("e" * 2**16)
    sys.stdout.write("o" * 2**16)
    talk.say("progress", doing="p" * 2**16)
talk.hear()
talk.obey(tokens_per_s=10.0)

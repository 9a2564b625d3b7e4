"""Fails with what it sees of its environment."""

import os

from tests.engine.children import talk

talk.hear()
threads = os.environ["OMP_NUM_THREADS"]
talk.say("broken", fault="error", reason=f"secret: {os.environ.get('OPTIGPU_API_KEY')}, threads: {threads}")

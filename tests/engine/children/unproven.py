"""Answers the order of a proof in the way that its first argument names; the second is the error's text."""

import os
import sys

from tests.engine.children import talk

order = talk.hear()
match sys.argv[1]:
    case "proves":
        talk.say("proven")
    case "breaks":
        talk.say("broken", fault="error", reason=sys.argv[2])
    case "has_no_memory":
        talk.say("broken", fault="out_of_memory", reason=sys.argv[2])
    case "dies":
        print("Traceback (most recent call last):\nImportError: libcudart.so.13", file=sys.stderr, flush=True)
        os._exit(3)
    case "digresses":
        talk.say("round", samples={})
talk.hear()

"""Tries batches as optigpu.child.largest_batch does: those up to its argument fit. A larger one ends it, or with
"recovers" runs out of memory. With -1 every batch fails for another reason than memory; with "hangs" it never answers.
"""

import sys
import time

from tests.engine.children import talk

bound, how = int(sys.argv[1]), sys.argv[2]
talk.hear()
talk.say("batches_ready", facts={"recorded": {"loaded": True}})
while True:
    batch = talk.hear()["batch_size"]
    if how == "hangs":
        talk.say("progress", doing="hanging")
        time.sleep(600)
    if bound < 0:
        talk.say("broken", fault="error", reason="no such thing")
    elif batch <= bound:
        talk.say("batch_tried", fits=True)
    elif how == "recovers":
        talk.say("batch_tried", fits=False, why="too much")
    else:
        sys.exit(1)

"""Tries batches as optigpu.child.largest_batch does: those up to its argument fit, and it dies of larger ones.

With -1 every batch fails for another reason than memory.
"""

import sys

bound = int(sys.argv[1])
sys.stdin.readline()
print("ready", flush=True)
for line in sys.stdin:
    if bound < 0:
        print("no such thing", flush=True)
    elif int(line) <= bound:
        print("fits", flush=True)
    else:
        sys.exit(1)

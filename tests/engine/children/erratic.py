"""Never settles: every second request is twice as fast. Gives just as many requests as it must.

Its argument is how long it says that a request takes, in seconds.
"""

import sys
import time
from itertools import cycle, islice

from tests.engine.children import talk

talk.hear()
talk.ready(request_s=float(sys.argv[1]))
rates = cycle([10.0, 20.0])
while True:
    command = talk.hear()
    if command["kind"] == "run_round":
        time.sleep(min(command["seconds"], 0.05))
        requests = [talk.samples(rate, 1) for rate in islice(rates, command["min_requests"])]
        talk.say("round", samples={name: [request[name][0] for request in requests] for name in requests[0]})
    elif command["kind"] == "run_audit":
        talk.say("audited", samples=talk.samples(15.0, command["requests"]))
    else:
        talk.say("metered", meter=command["meter"])

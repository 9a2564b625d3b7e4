"""A program that runs under CPython and under MicroPython, where its heap also holds the body of the request.

python fetch.py URL CA METHOD BODY_BYTES TIMEOUT_S prints the answer to a request, or the error, as JSON.
"""

import json
import sys

from esp32_agent.port.base import HttpError
from esp32_agent.port.http import HttpClient


def fetch(url, authority, method, body_bytes, timeout_s):
    if sys.implementation.name == "micropython":
        import esp32_agent.port.micropython.wire as wire
    else:
        import esp32_agent.port.host.build as wire
    context = None if authority == "-" else wire.tls_context(authority)
    client = HttpClient(url, wire.SocketWire, context)
    headers = {"Content-Type": "application/json", "Authorization": "OptiGPU1 key=k"}
    try:
        status, answered, body = client.request(
            method, "/v1/x", headers, b"b" * int(body_bytes), int(timeout_s)
        )
    except HttpError as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"status": status, "headers": answered, "body": body.decode()}))


fetch(*sys.argv[1:])

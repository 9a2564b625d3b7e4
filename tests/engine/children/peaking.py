"""Answers with invented peaks, and appends one line for each request to the file that it is given.

The rates of products are 10^9 at the first request and double with each.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path

from tests.engine.children import talk

order = talk.hear()
with Path(sys.argv[1]).open("a+") as asked:
    asked.write("asked\n")
    asked.seek(0)
    times = len(asked.readlines())
talk.say(
    "peaks",
    device=order["device"],
    threads=order["threads"],
    measured_at=datetime.now(UTC).isoformat(),
    torch="2.13.0",
    reads=[{"array_bytes": 2**20, "bytes_per_s": 1e9}],
    copy_bytes_per_s=1e9,
    matmul_flops_per_s={"float32": 2 ** (times - 1) * 1e9},
)
talk.hear()

"""`python -m benchmarks.bare_endpoint`: the least that FastAPI does for an answer of 52 kB, to compare with."""

import socket

import uvicorn
from fastapi import FastAPI, Request

SIZE_BYTES = 52_000


def app() -> FastAPI:
    """An application that returns a dict, and one that takes a body."""
    served = FastAPI()
    row = {"label": "int8_weight_only", "value": 123.456, "ci": [120.0, 126.0], "hardware": "1x Made-up GPU"}
    document: dict[str, object] = {"rows": [row] * (SIZE_BYTES // 96)}

    @served.get("/")
    def bare() -> dict[str, object]:
        return document

    @served.post("/v1/jobs", status_code=202)
    async def take(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    return served


def main() -> None:
    """Says where it listens, then serves until it is ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(f"listens on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app(), log_config=None, access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main()

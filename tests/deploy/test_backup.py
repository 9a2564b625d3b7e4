"""Backup, restore and upgrade by the commands of docs/gpu-box.md, with data, on both databases.

In place of `docker compose exec postgres` the commands run on this machine, against the tests' PostgreSQL.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, make_url

import migrations
from optigpu.store import keys
from optigpu.store.database import default_url
from tests.deploy.compose import ROOT
from tests.servers.machine import this_machine
from tests.servers.postgres import fresh_database
from tests.service.records import a_metric, a_result
from tests.service.serving import MATMUL, Served, serving

pytestmark = pytest.mark.slow

DOCS = (ROOT / "docs" / "gpu-box.md").read_text()
OLDER = "0005"
"""The revision of the version that is upgraded."""
COMPOSE = """#!/bin/sh
case "$2" in
exec) shift 4; {in_postgres} "$@";;
run) cd {root} && {python} -m alembic upgrade head;;
ps) echo worker-cpu;;
esac
"""


def commands(heading: str) -> str:
    """The block of commands below a comment of the page."""
    found = re.findall(rf"<!-- {heading} -->\n```\n(.*?)^```$", DOCS, re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    return str(found[0])


def fill(served: Served) -> None:
    """A job with two results, samples and a key."""
    served.submit(MATMUL)
    results = [
        a_result({"tflops": a_metric("tflops", n + 1.0)}, index=n, stack=("bf16",) * n, workload="matmul")
        for n in range(2)
    ]
    served.finish(served.claim(), *results, samples={"tflops": ((1.0, 2.0), (3.0,))})


def everything(served: Served) -> dict[str, Any]:
    """What readers see: leaderboard, jobs, results with their samples."""
    paths = ["/v1/leaderboard", "/v1/jobs"]
    jobs = served.client.get("/v1/jobs").json()["jobs"]
    results = served.client.get(jobs[0]["links"]["results"]).json()["results"]
    paths += [f"/v1/results/{result['id']}{part}" for result in results for part in ("", "/samples")]
    read = {path: served.client.get(path) for path in paths}
    assert {path: answer.status_code for path, answer in read.items()} == dict.fromkeys(paths, 200)
    return {path: answer.json() for path, answer in read.items()}


@pytest.fixture
def url(postgres_server_url: str) -> Iterator[str]:
    """A database of the test's own, which its commands drop and create."""
    with fresh_database(postgres_server_url) as url:
        yield url


@pytest.fixture
def in_docker_s_place(url: str, tmp_path: Path) -> Mapping[str, str]:
    """The environment of a shell where `docker compose` runs its commands here, as they run in the containers."""
    address = make_url(url)
    machine = this_machine()
    dump = machine.program("pg_dump")
    # Where PostgreSQL itself is a container, so are its programs.
    options = f"--rm --interactive --network host --env-file {tmp_path}/variables"
    image = f"{shutil.which('docker')} run {options} postgres:17"
    for name, script in (
        ("docker", COMPOSE.format(in_postgres="" if dump else image, root=ROOT, python=sys.executable)),
        ("make", "#!/bin/sh\n"),
    ):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(script)
        program.chmod(0o755)
    container = as_in_the_container(address)
    (tmp_path / "variables").write_text("".join(f"{name}={value}\n" for name, value in container.items()))
    folders = [str(tmp_path / "bin"), *([str(Path(dump).parent)] if dump else []), os.environ["PATH"]]
    return os.environ | container | {"PATH": os.pathsep.join(folders), "OPTIGPU_DATABASE_URL": url}


def as_in_the_container(address: URL) -> dict[str, str]:
    """What the postgres service has in its environment, and where its programs find the server."""
    return {
        "POSTGRES_USER": str(address.username),
        "POSTGRES_DB": str(address.database),
        "PGHOST": str(address.host),
        "PGPORT": str(address.port or 5432),
        "PGPASSWORD": str(address.password or ""),
    }


def run(script: str, folder: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_postgresql_of_an_older_version_is_backed_up_restored_and_upgraded(
    url: str, in_docker_s_place: Mapping[str, str], tmp_path: Path
) -> None:
    with serving(url) as served:
        fill(served)
        before = everything(served)
        migrations.downgrade(url, OLDER)
        run(commands("backup with docker"), tmp_path, in_docker_s_place)
    migrations.downgrade(url, "base")  # the loss
    run(commands("restore with docker"), tmp_path, in_docker_s_place)
    assert migrations.lacking(url) is None
    with serving(url) as served:
        assert everything(served) == before
        served.submit(MATMUL)
    assert (tmp_path / "optigpu.dump").stat().st_size > 0


def test_sqlite_of_an_older_version_is_backed_up_while_it_serves_and_upgraded(tmp_path: Path) -> None:
    url = default_url(tmp_path / "data")
    command = commands("backup of sqlite").replace(
        "~/.local/share/optigpu/optigpu.db", str(tmp_path / "data" / "optigpu.db")
    )
    with serving(url) as served:
        fill(served)
        with served.database.write() as session:
            plain = keys.create(session, "a reader", ["read"])
        served.client.headers["Authorization"] = f"Bearer {plain}"
        before = everything(served)
        migrations.downgrade(url, OLDER)
        run(command, tmp_path, os.environ)
    with serving(f"sqlite:///{tmp_path / 'optigpu-backup.db'}") as served:
        assert served.client.get("/v1/jobs").status_code == 401
        served.client.headers["Authorization"] = f"Bearer {plain}"
        assert everything(served) == before

"""docker-compose.worker.yml against a service elsewhere: PostgreSQL and Redis with TLS, and the API.

The API is started by the commands of docs/gpu-box.md.
"""

import re

import pytest

from tests.deploy.compose import ROOT
from tests.docker.conftest import JOB, Deployed
from tests.docker.host import Host

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ELSEWHERE = "172.17.0.1"
"""The address of Docker's own bridge, which containers of any network reach."""
CERTIFICATES = f"""
mkdir -p /etc/optigpu/certificates /srv/elsewhere
docker run --rm --volume /srv/elsewhere:/srv --workdir /srv --entrypoint sh postgres:17 -ec '
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.crt
openssl req -newkey rsa:2048 -nodes -subj /CN=server -keyout server.key \\
  -addext subjectAltName=IP:{ELSEWHERE} -out server.csr
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -copy_extensions copy -out server.crt
chown postgres server.key
' 2>/dev/null
cp /srv/elsewhere/ca.crt /etc/optigpu/certificates/ca.crt
"""
SERVERS = f"""
docker run --detach --volume /srv/elsewhere:/etc/tls:ro --publish {ELSEWHERE}:5432:5432 --env POSTGRES_USER=optigpu \\
  --env POSTGRES_PASSWORD=PASSWORD --env POSTGRES_DB=optigpu --name elsewhere-postgres \\
  postgres:17 postgres -c ssl=on -c ssl_cert_file=/etc/tls/server.crt -c ssl_key_file=/etc/tls/server.key
docker run --detach --volume /srv/elsewhere:/etc/tls:ro --publish {ELSEWHERE}:6379:6379 --name elsewhere-redis \\
  redis:7-alpine redis-server --port 0 --tls-port 6379 --tls-cert-file /etc/tls/server.crt \\
  --tls-key-file /etc/tls/server.key --tls-ca-cert-file /etc/tls/ca.crt --tls-auth-clients no --requirepass PASSWORD
until docker exec elsewhere-postgres pg_isready --username=optigpu --host=127.0.0.1; do sleep 0.2; done
"""


def the_page_s_api() -> str:
    """The commands that start the API on its own host."""
    page = (ROOT / "docs" / "gpu-box.md").read_text()
    (found,) = re.findall(
        r"^```\n(docker run --rm --env-file \.env .*?)^```$", page, re.DOTALL | re.MULTILINE
    )
    return str(found)


@pytest.fixture(scope="module")
def workers(host: Host, deployed: Deployed) -> Deployed:
    """Workers that `make workers` started, and a service that they have nothing but two addresses of."""
    key, torch = deployed.settings["OPTIGPU_API_KEY"], deployed.settings["TORCH"]
    host.shell("make down")
    host.shell(CERTIFICATES + SERVERS)
    env = host.folder / ".env"
    text = (host.folder / ".env.worker.example").read_text()
    for theirs, ours in (
        ("db.example.org", ELSEWHERE),
        ("redis.example.org", ELSEWHERE),
        ("TORCH=cuda", f"TORCH={torch}"),
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    env.write_text(f"{text}\nOPTIGPU_API_KEY={key}\n")
    host.shell(the_page_s_api())
    return Deployed(host, host.shell("make workers"))


def test_a_worker_with_two_addresses_measures_for_a_service_elsewhere(workers: Deployed) -> None:
    workers.wait_until_healthy()
    job = workers.measured(JOB)
    assert workers.ranked() == {job}


OTHER_AUTHORITY = """
docker compose run --detach --name refused --entrypoint sh worker-cpu -c '
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=other -keyout /dev/null -out /tmp/ca.crt 2>/dev/null
export OPTIGPU_DATABASE_URL=$(echo $OPTIGPU_DATABASE_URL | sed s,/etc/optigpu/certificates,/tmp,)
exec python -m worker --device cpu'
"""


def test_a_certificate_of_another_authority_is_refused_in_a_sentence(workers: Deployed) -> None:
    """The worker says so and waits for a server that it may trust."""
    workers.host.shell(OTHER_AUTHORITY)
    logs = "docker logs refused 2>&1"
    workers.wait_until(
        "the server is refused", lambda: "certificate verify failed" in workers.host.shell(logs)
    )
    assert "Traceback" not in workers.host.shell(logs)
    workers.host.shell("docker rm --force refused")

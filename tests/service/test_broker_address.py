"""Addresses of servers with passwords and TLS, as every library of ours reads them."""

import ssl

import pytest
import redis
from dotenv import dotenv_values
from kombu.connection import Connection

from optigpu.store.database import engine_for
from optigpu.store.doorbell import broker_url
from tests.pages import ROOT

EXAMPLE = dotenv_values(ROOT / ".env.worker.example")
CERTIFICATE = "/etc/optigpu/certificates/ca.crt"


def test_the_example_of_redis_checks_the_server_for_celery_and_for_redis() -> None:
    address = str(EXAMPLE["OPTIGPU_REDIS_URL"])
    with Connection(broker_url(address)) as broker:
        assert broker.ssl == {
            "ssl_cert_reqs": ssl.CERT_REQUIRED,
            "ssl_check_hostname": True,
            "ssl_ca_certs": CERTIFICATE,
        }
        assert (broker.password, broker.hostname, broker.port) == ("PASSWORD", "redis.example.org", 6379)
    with redis.Redis.from_url(address) as client:
        pool = client.connection_pool
        assert pool.connection_class is redis.SSLConnection
        assert pool.connection_kwargs["ssl_ca_certs"] == CERTIFICATE
        assert pool.connection_kwargs["password"] == "PASSWORD"
        assert pool.make_connection().check_hostname


def test_the_example_of_postgresql_checks_the_server() -> None:
    engine = engine_for(str(EXAMPLE["OPTIGPU_DATABASE_URL"]))
    _, options = engine.dialect.create_connect_args(engine.url)
    assert (options["sslmode"], options["sslrootcert"]) == ("verify-full", CERTIFICATE)
    assert (options["host"], options["password"]) == ("db.example.org", "PASSWORD")


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("redis://host/0", "redis://host/0"),
        ("rediss://host/0", "rediss://host/0?ssl_cert_reqs=required"),
        ("rediss://host/0?ssl_ca_certs=/ca", "rediss://host/0?ssl_ca_certs=/ca&ssl_cert_reqs=required"),
        ("rediss://host/0?ssl_cert_reqs=none", "rediss://host/0?ssl_cert_reqs=none"),
    ],
)
def test_tls_checks_the_certificate_unless_the_address_says_otherwise(address: str, asked: str) -> None:
    assert broker_url(address) == asked
    with Connection(broker_url(address)) as broker:
        checked = (broker.ssl or {}).get("ssl_cert_reqs")
    assert checked == (
        ssl.CERT_REQUIRED if "required" in asked else ssl.CERT_NONE if "none" in asked else None
    )

"""The keys of the compose specification that our files may use, and what to say of any other.

Source: the compose specification, https://github.com/compose-spec/compose-spec/blob/main/spec.md. Listed are the keys
of the version of January 2024, of the parts that our files have.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

TOP = {"name", "version", "services", "volumes", "networks", "configs", "secrets", "include"}
SERVICE = {
    *(
        "annotations",
        "attach",
        "blkio_config",
        "build",
        "cap_add",
        "cap_drop",
        "cgroup",
        "cgroup_parent",
        "command",
    ),
    *("configs", "container_name", "cpu_count", "cpu_percent", "cpu_period", "cpu_quota", "cpu_rt_period"),
    *("cpu_rt_runtime", "cpu_shares", "cpus", "cpuset", "credential_spec", "depends_on", "deploy", "develop"),
    *(
        "device_cgroup_rules",
        "devices",
        "dns",
        "dns_opt",
        "dns_search",
        "domainname",
        "entrypoint",
        "env_file",
    ),
    *(
        "environment",
        "expose",
        "extends",
        "external_links",
        "extra_hosts",
        "group_add",
        "healthcheck",
        "hostname",
    ),
    *("image", "init", "ipc", "isolation", "labels", "links", "logging", "mac_address", "mem_limit"),
    *("mem_reservation", "mem_swappiness", "memswap_limit", "network_mode", "networks", "oom_kill_disable"),
    *("oom_score_adj", "pid", "pids_limit", "platform", "ports", "privileged", "profiles", "pull_policy"),
    *("read_only", "restart", "runtime", "scale", "secrets", "security_opt", "shm_size", "stdin_open"),
    *(
        "stop_grace_period",
        "stop_signal",
        "storage_opt",
        "sysctls",
        "tmpfs",
        "tty",
        "ulimits",
        "user",
        "userns_mode",
    ),
    *("uts", "volumes", "volumes_from", "working_dir"),
}
BELOW_A_SERVICE = {
    ("build",): {
        *(
            "additional_contexts",
            "args",
            "cache_from",
            "cache_to",
            "context",
            "dockerfile",
            "dockerfile_inline",
        ),
        *(
            "extra_hosts",
            "isolation",
            "labels",
            "network",
            "no_cache",
            "platforms",
            "privileged",
            "pull",
            "secrets",
        ),
        *("shm_size", "ssh", "tags", "target", "ulimits"),
    },
    ("healthcheck",): {"disable", "interval", "retries", "start_interval", "start_period", "test", "timeout"},
    ("logging",): {"driver", "options"},
    ("deploy",): {
        *("endpoint_mode", "labels", "mode", "placement", "replicas", "resources", "restart_policy"),
        *("rollback_config", "update_config"),
    },
    ("deploy", "resources"): {"limits", "reservations"},
    ("deploy", "resources", "reservations"): {"cpus", "devices", "generic_resources", "memory"},
    ("deploy", "resources", "reservations", "devices"): {
        *("capabilities", "count", "device_ids", "driver", "options"),
    },
}
NEEDED_OF_A_DEPENDENCY = {"condition", "required", "restart"}


def wrong_keys(document: Mapping[str, Any]) -> list[str]:
    """A sentence for each key that compose would refuse, with its place and with what may be meant."""
    return list(_wrong(document))


def _wrong(document: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown("", document, TOP)
    volumes = document.get("volumes", {})
    for name, service in document["services"].items():
        yield from _unknown(f"services.{name}.", service, SERVICE)
        for path, known in BELOW_A_SERVICE.items():
            for part in _parts(service, path):
                yield from _unknown(".".join(["services", name, *path, ""]), part, known)
        yield from _lost(name, service, document["services"], volumes)


def _parts(node: Any, path: tuple[str, ...]) -> list[Any]:
    """The mappings at a path; each of them where a list stands there."""
    for key in path:
        node = node.get(key, {}) if isinstance(node, Mapping) else {}
    return node if isinstance(node, list) else [node]


def _unknown(place: str, node: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    for key in node:
        if key not in known and not key.startswith("x-"):
            close = get_close_matches(key, known, n=1)
            meant = f" Did you mean {close[0]}?" if close else ""
            yield f"{place}{key} is not a key of the compose specification.{meant}"


def _lost(
    name: str, service: Mapping[str, Any], services: Mapping[str, Any], volumes: Mapping[str, Any]
) -> Iterator[str]:
    """Services and volumes that are named and not there."""
    for needed, how in service.get("depends_on", {}).items():
        if needed not in services:
            yield f"services.{name}.depends_on.{needed}: there is no such service."
        yield from _unknown(f"services.{name}.depends_on.{needed}.", how, NEEDED_OF_A_DEPENDENCY)
    for mounted in service.get("volumes", ()):
        source = mounted.partition(":")[0]
        if not source.startswith(("/", ".")) and source not in volumes:
            yield f"services.{name}.volumes: there is no volume {source}."

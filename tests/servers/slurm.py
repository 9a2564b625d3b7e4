"""Slurm for the tests: a cluster of one node on this machine, whose daemons can be ended and started again."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.servers.process import (
    Machine,
    NoServerError,
    Server,
    end,
    end_with_parent,
    free_port,
    scratch_folder,
    wait_until_it_answers,
)
from tests.servers.rule import Kind

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/c.pid
SlurmdPidFile={folder}/d.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
SlurmctldTimeout=5
SlurmdTimeout=5
MessageTimeout=5
KillWait=5
MinJobAge=300
CompleteWait=0
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 Gres=gpu:fake:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=01:00:00 State=UP
"""
GPUS = """\
NodeName={host} Name=gpu Type=fake File=/dev/null
NodeName={host} Name=gpu Type=fake File=/dev/zero
"""
"""A character device for each."""


@dataclass
class Cluster:
    """The running daemons, by their names."""

    configuration: Path
    commands: dict[str, list[str]]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        with (self.configuration.parent / f"{name}.out").open("ab") as printed:
            self.running[name] = subprocess.Popen(
                self.commands[name],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
                preexec_fn=end_with_parent,
                env=self.variables(),
            )

    def variables(self) -> dict[str, str]:
        return dict(os.environ) | {"SLURM_CONF": str(self.configuration)}

    def ask(self, *command: str) -> str:
        """What one of Slurm's programs prints."""
        done = subprocess.run(command, env=self.variables(), capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def node_state(self) -> str:
        """As Slurm calls it; empty while its controller does not answer."""
        return self._try("sinfo", "--noheader", "--format=%t").strip()

    def is_up(self) -> bool:
        """Whether the node takes jobs."""
        return self.node_state() in ("idle", "mix", "alloc")

    def _try(self, *command: str) -> str:
        """What it prints, if it answers."""
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, env=self.variables(), capture_output=True, text=True, timeout=3, check=False
            )
            return done.stdout
        return ""

    def kill_the_node(self) -> None:
        """As a machine that lost its power: none of its processes can tell that another one has ended."""
        processes = _of_the_node(self)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                with suppress(psutil.Error):
                    process.send_signal(number)
        self.running["slurmd"].wait()

    def start_the_node(self) -> None:
        self.start("slurmd")

    def stop(self) -> None:
        """Ends the jobs before the daemons: what watches a job outlives the daemon that started it."""
        own = f"--user={getpass.getuser()}"
        self._try("scancel", own, "--state=PENDING")
        self._try("scancel", own, "--signal=KILL", "--full")
        until = time.monotonic() + 5
        while self._try("squeue", "--noheader").strip() and time.monotonic() < until:
            time.sleep(0.1)
        for process in _of_the_node(self):
            with suppress(psutil.Error):
                process.kill()
        for process in reversed(self.running.values()):
            end(process, signal.SIGTERM)


def cluster_of(server: Server) -> Cluster:
    """The cluster behind a server that `provide` returned."""
    return _CLUSTERS[server.url]


_CLUSTERS: dict[str, Cluster] = {}


def _start(machine: Machine) -> Server | None:
    found = {name: machine.program(name) for name in PROGRAMS}
    if not all(found.values()):
        return None
    folder = scratch_folder(None)
    configuration = _write(folder)
    cluster = Cluster(configuration, _commands({name: str(path) for name, path in found.items()}, folder))

    def stop() -> None:
        cluster.stop()
        _CLUSTERS.pop(str(configuration), None)
        shutil.rmtree(folder, ignore_errors=True)

    try:
        for name in ("munged", "slurmctld", "slurmd"):
            cluster.start(name)
            if name == "munged":
                wait_until_it_answers((folder / "munge" / "sock").exists, "munged")
        wait_until_it_answers(cluster.is_up, "Slurm")
    except NoServerError as error:
        said = (folder / "log" / "slurmctld").read_text(errors="replace")[-500:]
        stop()
        raise NoServerError(f"{error} Its log ends: {said}") from error
    except BaseException:
        stop()
        raise
    _CLUSTERS[str(configuration)] = cluster
    return Server(str(configuration), origin="programs", stop=stop)


def _write(folder: Path) -> Path:
    for name in ("munge", "state", "spool", "etc", "log"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    values = {
        "host": host,
        "controller": free_port(),
        "node": free_port(),
        "user": getpass.getuser(),
        "folder": folder,
    }
    (folder / "etc" / "gres.conf").write_text(GPUS.format(host=host))
    configuration = folder / "etc" / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(**values))
    return configuration


def _commands(found: dict[str, str], folder: Path) -> dict[str, list[str]]:
    munge = folder / "munge"
    configuration = str(folder / "etc" / "slurm.conf")
    host = socket.gethostname().partition(".")[0]
    parts = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return {
        "munged": [
            found["munged"],
            "--foreground",
            "--force",
            *(f"--{name}={munge / file}" for name, file in parts.items()),
        ],
        "slurmctld": [found["slurmctld"], "-D", "-c", "-f", configuration],
        "slurmd": [found["slurmd"], "-D", "-N", host, "-f", configuration],
    }


def _of_the_node(cluster: Cluster) -> Sequence[psutil.Process]:
    """The node's daemon, the processes of its jobs, and what watches these, which is a parent of theirs."""
    found = {psutil.Process(cluster.running["slurmd"].pid)}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            variables = process.environ()
            if variables.get("SLURM_CONF") == str(cluster.configuration) and "SLURM_JOB_ID" in variables:
                found.add(process)
                found.update(each for each in process.parents() if each.name() == "slurmstepd")
    return list(found)


def _none_is_found(_machine: Machine, _port: int) -> list[str]:
    """Nobody's own cluster is for tests."""
    return []


def _none_answers(_url: str) -> bool:
    return False


SLURM = Kind(
    name="Slurm",
    variable="",
    standard_port=0,
    package="slurm-wlm munge",
    image="",
    image_environment=(),
    candidates=_none_is_found,
    answers=_none_answers,
    programs=PROGRAMS,
    start=_start,
)

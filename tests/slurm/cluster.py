"""A Slurm of three nodes on this one machine, for tests: `cluster.py start FOLDER`, `cluster.py stop FOLDER`.

As root. `start` installs Debian's packages if they are missing and apt is there, and starts munge, a
controller and three slurmd that pretend to be hosts n1 to n3 with eight cores each. n3 is for tests that
disturb a node: jobs of its partition `high` preempt those of `again`, which are queued again after 15 s, and
of `gone`, which are not. Commands find it by
`SLURM_CONF=FOLDER/slurm.conf`. There is no accounting, so sacct has nothing to say. `stop` ends the processes
that `start` noted.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = ("n1", "n2", "n3")
CONFIG = """\
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=2000 State=UNKNOWN
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=8 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PreemptMode=OFF
PartitionName=again Nodes=n3 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
PartitionName=gone Nodes=n3 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime=15
PartitionName=high Nodes=n3 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def start(folder: Path) -> None:
    """Bring the cluster up, or leave a running one as it is."""
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    if (folder / "slurm.conf").exists() and idle_nodes() == len(NODES):
        return
    install()
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    name_hosts()
    host = socket.gethostname().partition(".")[0]
    text = CONFIG.format(folder=folder, host=host, ports=free_ports(1 + len(NODES)))
    (folder / "slurm.conf").write_text(text)
    start_munge(folder)
    subprocess.run(["slurmctld"], check=True)
    for node in NODES:
        subprocess.run(["slurmd", "-N", node], check=True)
    wait_for(lambda: idle_nodes() == len(NODES), 30, folder)


def install() -> None:
    """Debian's packages, where they are missing and can be had."""
    if all(shutil.which(name) for name in ("slurmctld", "slurmd", "sbatch", "munged")):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SystemExit(f"{', '.join(PACKAGES)} are missing; installing them takes root and apt-get")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    words = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *PACKAGES]
    subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)


def name_hosts() -> None:
    """The names of the nodes, and of this machine, resolve: the first node's is where ranks meet."""
    for name in (socket.gethostname().partition(".")[0], *NODES):
        try:
            socket.gethostbyname(name)
        except OSError:
            with Path("/etc/hosts").open("a") as file:
                file.write(f"127.0.0.1 {name}\n")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start_munge(folder: Path) -> None:
    """A munge of our own beside a machine's: its own key and its own socket."""
    key = folder / "munge.key"
    if not key.exists():
        key.write_bytes(secrets.token_bytes(256))
        key.chmod(0o600)
    places = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
    places |= {"seed-file": folder / "munge.seed", "log-file": folder / "munge.log"}
    subprocess.run(["munged", "--force", *(f"--{name}={path}" for name, path in places.items())], check=True)


def idle_nodes() -> int:
    """Nodes that take jobs."""
    try:
        done = subprocess.run(["sinfo", "-h", "-N", "-t", "idle,mixed", "-o", "%N"], capture_output=True)
    except OSError:
        return 0
    return len(set(done.stdout.split()))


def wait_for(condition: Callable[[], bool], seconds: float, folder: Path) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            logs = [path.read_text(errors="replace")[-2000:] for path in folder.glob("slurm*.log")]
            raise SystemExit("Slurm did not come up:\n" + "\n".join(logs))
        time.sleep(0.1)


def stop(folder: Path) -> None:
    """End the processes of `start`, munge last; whose pid is another program's now is left alone."""
    for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld", "munged"):
        file = folder / f"{name}.pid"
        if not file.exists():
            continue
        pid = int(file.read_text())
        for number in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + 5
            while is_ours(pid, name.partition("-")[0]) and time.monotonic() < end:
                os.kill(pid, number)
                time.sleep(0.2)
        file.unlink(missing_ok=True)


def is_ours(pid: int, program: str) -> bool:
    """Whether the process runs the program; a zombie runs nothing."""
    try:
        return program in Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return False


def main() -> None:
    """Start or stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["start", "stop"])
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    arguments = parser.parse_args()
    (start if arguments.what == "start" else stop)(arguments.folder)


if __name__ == "__main__":
    main()

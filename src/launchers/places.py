"""Which rank an environment names, and what a process of it becomes: a table, pure functions (DIRECT)."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from src.config import Config
from src.errors import Problem, UserError
from src.launchers import hostlist

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets, all of them."""
SRUN = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")
"""Variables of a step of srun."""
SPUR = (
    "SPUR_STEP_NUM_TASKS",
    "SPUR_NNODES",
    "SPUR_PROCID",
    "SPUR_LOCALID",
    "SPUR_JOB_ID",
    "SPUR_JOB_NODELIST",
)
"""Variables of a step of Spur's srun."""
POD = ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "GPUS_PER_NODE")
"""Variables of a pod; the number of the node may also come from elsewhere (`ORDINALS`)."""
PORTS = range(1024, 65536)
"""Ports that a process without privileges may bind."""


@dataclass(frozen=True)
class Place:
    """One of several processes that were started together."""

    source: str
    """`torchrun`, `srun`, `srun of Spur` or `a pod`."""
    rank: int
    tasks: int
    """Processes in all."""
    local_rank: int
    local_tasks: int
    """Processes on this node."""
    nodes: int
    address: str
    port: int
    has_store: bool = False
    """Whether an agent of torchrun serves the store at `port`."""
    per_node: int | None = None
    """Ranks that each process is to start, where the environment says so."""

    def variables(self, attempt: int) -> dict[str, str]:
        """What a rank reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.tasks),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_tasks),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "MANYHEAD_ATTEMPT": str(attempt),
        }


def recognise(
    shell: Mapping[str, str], node_rank_from: Callable[[], str] = lambda: "NODE_RANK"
) -> Place | None:
    """The row of the table that matches; None where this process is an ordinary launch.

    Args:
        shell: this process's environment.
        node_rank_from: gives `launcher.node_rank_from`; asked only by a pod whose number is not given.

    Raises:
        UserError: a row matches in part, or contradicts itself (2).
    """
    if "SPUR_JOB_ID" in shell and "TORCHELASTIC_RUN_ID" not in shell:
        # Spur itself sets RANK, WORLD_SIZE and MASTER_*, as if each node were one rank.
        is_step = "SPUR_STEP_ID" in shell and shell.get("SPUR_STEP_NUM_TASKS", "1") != "1"
        return _of_spur(shell) if is_step else None
    if all(name in shell for name in TORCHRUN):
        return _of_torchrun(shell)
    if "SLURM_STEP_ID" in shell and shell.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _of_srun(shell)
    if all(name in shell for name in POD if name != "NODE_RANK"):
        return _of_pod(shell, node_rank_from)
    if "RANK" in shell and "WORLD_SIZE" in shell:
        _need(shell, TORCHRUN, "torchrun")
    if "SLURM_JOB_ID" not in shell and any(name in shell for name in POD):
        _need(shell, POD, "a pod")
    return None


def _of_torchrun(shell: Mapping[str, str]) -> Place:
    world, local = int(shell["WORLD_SIZE"]), int(shell.get("LOCAL_WORLD_SIZE", shell["WORLD_SIZE"]))
    return Place(
        source="torchrun",
        rank=int(shell["RANK"]),
        tasks=world,
        local_rank=int(shell["LOCAL_RANK"]),
        local_tasks=local,
        nodes=max(1, world // max(1, local)),
        address=shell["MASTER_ADDR"],
        port=int(shell["MASTER_PORT"]),
        has_store=shell.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _of_srun(shell: Mapping[str, str]) -> Place:
    _need(shell, SRUN, "srun")
    first = hostlist.first(shell.get("SLURM_STEP_NODELIST") or shell["SLURM_JOB_NODELIST"])
    preset = shell.get("MASTER_ADDR", first)
    if preset.partition(".")[0] != first.partition(".")[0]:
        message = f"MASTER_ADDR={preset} is not the first host of the step, {first}"
        raise _refused("MASTER_ADDR", message, "unset MASTER_ADDR")
    tasks, nodes = int(shell["SLURM_STEP_NUM_TASKS"]), int(shell["SLURM_STEP_NUM_NODES"])
    numbers = int(shell["SLURM_JOB_ID"]) + 7 * int(shell["SLURM_STEP_ID"])
    return Place(
        source="srun",
        rank=int(shell["SLURM_PROCID"]),
        tasks=tasks,
        local_rank=int(shell["SLURM_LOCALID"]),
        local_tasks=max(1, tasks // nodes),
        nodes=nodes,
        address=preset,
        port=int(shell.get("MASTER_PORT", 12000 + numbers % 20000)),
    )


def _of_spur(shell: Mapping[str, str]) -> Place:
    _need(shell, SPUR, "srun of Spur")
    tasks, nodes = int(shell["SPUR_STEP_NUM_TASKS"]), int(shell["SPUR_NNODES"])
    numbers = int(shell["SPUR_JOB_ID"]) + 7 * int(shell["SPUR_STEP_ID"])
    return Place(
        source="srun of Spur",
        rank=int(shell["SPUR_PROCID"]),
        tasks=tasks,
        local_rank=int(shell["SPUR_LOCALID"]),
        local_tasks=max(1, tasks // nodes),
        nodes=nodes,
        address=hostlist.first(shell["SPUR_JOB_NODELIST"]),
        port=12000 + numbers % 20000,
    )


def _of_pod(shell: Mapping[str, str], node_rank_from: Callable[[], str]) -> Place:
    number, source = shell.get("NODE_RANK"), "NODE_RANK"
    if number is None:
        source = node_rank_from()
        number = ORDINALS[source](shell)
    if number is None:
        fix = "set NODE_RANK, or type launcher.node_rank_from=completion_index or hostname"
        raise _refused("NODE_RANK", f"missing beside {', '.join(POD[:3])}; {source} gives no number", fix)
    nodes, rank = _number("NNODES", shell["NNODES"], 1), _number(source, number, 0)
    port, per_node = (
        _number("MASTER_PORT", shell["MASTER_PORT"], 1),
        _number("GPUS_PER_NODE", shell["GPUS_PER_NODE"], 1),
    )
    if rank >= nodes:
        raise _refused(
            source, f"{source}={rank}, but NNODES={nodes}", f"number the nodes from 0 to {nodes - 1}"
        )
    if port not in PORTS:
        message = f"{port} is none of {PORTS.start} to {PORTS.stop - 1}"
        raise _refused("MASTER_PORT", message, "set MASTER_PORT=29400, or another free port")
    address = shell["MASTER_ADDR"]
    return Place("a pod", rank, nodes, 0, 1, nodes, address, port, per_node=per_node)


def _number(name: str, text: str, least: int) -> int:
    """A variable's whole number."""
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise _refused(name, f"{text!r} is no whole number from {least} on", f"set {name} to a number")
    return int(text)


def _ordinal(shell: Mapping[str, str]) -> str | None:
    """The number at the end of a host name, as a StatefulSet gives it: `worker-3` is 3."""
    found = re.search(r"-(\d+)$", shell.get("HOSTNAME", socket.gethostname()).partition(".")[0])
    return None if found is None else found[1]


ORDINALS: dict[str, Callable[[Mapping[str, str]], str | None]] = {
    "NODE_RANK": lambda shell: None,
    "completion_index": lambda shell: shell.get("JOB_COMPLETION_INDEX"),
    "hostname": _ordinal,
}
"""`launcher.node_rank_from` → the number of a pod without `NODE_RANK` (DIRECT-3)."""


def role(place: Place, config: Config) -> str:
    """`rank` where each process is one, `node` where each starts the ranks of its node.

    Raises:
        UserError: the number of processes is neither (2), with both numbers.
    """
    world = config.mesh.world
    if place.per_node is not None:
        return _role_of_pod(place, config)
    if place.tasks == world:
        return "rank"
    if place.source != "torchrun" and place.tasks == place.nodes and world % place.tasks == 0:
        return "node"
    message = f"{place.source} started {place.tasks} processes, mesh={config.mesh.spec} has {world} ranks"
    fix = f"start {world} processes" + (", or one a node" if place.source != "torchrun" else "")
    raise _refused("mesh", message, fix)


def _role_of_pod(place: Place, config: Config) -> str:
    world = config.mesh.world
    if place.tasks * (place.per_node or 0) == world:
        return "node"
    sum_of = (
        f"NNODES={place.tasks} x GPUS_PER_NODE={place.per_node} = {place.tasks * (place.per_node or 0)} ranks"
    )
    message = f"{sum_of}, mesh={config.mesh.spec} has {world}"
    raise _refused("mesh", message, "take a mesh of as many ranks, or other numbers of nodes and ranks")


def _need(shell: Mapping[str, str], names: tuple[str, ...], source: str) -> None:
    missing = [name for name in names if name not in shell]
    if missing:
        message = f"{', '.join(missing)} missing beside the other variables of {source}"
        raise _refused(missing[0], message, f"start by {source}, or unset its variables")


def _refused(key: str, message: str, fix: str) -> UserError:
    return UserError([Problem(key, message, fix, "DIRECT")])

"""Which rank an environment names, and what a process of it becomes: a table, pure functions (DIRECT)."""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True)
class Place:
    """One of several processes that were started together."""

    source: str
    """`torchrun`, `srun` or `srun of Spur`."""
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


def recognise(shell: Mapping[str, str]) -> Place | None:
    """The row of the table that matches; None where this process is an ordinary launch.

    Raises:
        UserError: a row matches in part, or contradicts itself (2).
    """
    if "SPUR_JOB_ID" in shell and "TORCHELASTIC_RUN_ID" not in shell:
        # Spur itself sets RANK, WORLD_SIZE and MASTER_*, as if each node were one rank.
        is_step = "SPUR_STEP_ID" in shell and shell.get("SPUR_STEP_NUM_TASKS", "1") != "1"
        return _of_spur(shell) if is_step else None
    if "RANK" in shell and "WORLD_SIZE" in shell:
        return _of_torchrun(shell)
    if "SLURM_STEP_ID" in shell and shell.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _of_srun(shell)
    return None


def _of_torchrun(shell: Mapping[str, str]) -> Place:
    _need(shell, TORCHRUN, "torchrun")
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


def role(place: Place, config: Config) -> str:
    """`rank` where each process is one, `node` where each starts the ranks of its node.

    Raises:
        UserError: the number of processes is neither (2), with both numbers.
    """
    world = config.mesh.world
    if place.tasks == world:
        return "rank"
    if place.source != "torchrun" and place.tasks == place.nodes and world % place.tasks == 0:
        return "node"
    message = f"{place.source} started {place.tasks} processes, mesh={config.mesh.spec} has {world} ranks"
    fix = f"start {world} processes" + (", or one a node" if place.source != "torchrun" else "")
    raise _refused("mesh", message, fix)


def _need(shell: Mapping[str, str], names: tuple[str, ...], source: str) -> None:
    missing = [name for name in names if name not in shell]
    if missing:
        message = f"{', '.join(missing)} missing beside the other variables of {source}"
        raise _refused(missing[0], message, f"start by {source}, or unset its variables")


def _refused(key: str, message: str, fix: str) -> UserError:
    return UserError([Problem(key, message, fix, "DIRECT")])

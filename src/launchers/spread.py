"""How the ranks of a mesh are spread over the nodes of a job: pure arithmetic (PLAN-2)."""

from __future__ import annotations

from dataclasses import dataclass

from src.config import SCHEDULERS, Config
from src.errors import Problem, UserError


@dataclass(frozen=True)
class Spread:
    """Nodes of a launch, each with the same number of ranks."""

    nodes: int
    ranks: int
    """Ranks of one node."""


def spread(config: Config, platform: str) -> Spread:
    """As few nodes as the mesh needs, or `launcher.nodes` of them; local launches have one.

    Raises:
        UserError: numbers that contradict each other, with the arithmetic (2).
    """
    world, nodes, gpus = config.mesh.world, config.launcher.nodes, config.launcher.gpus_per_node
    if config.launcher.name not in SCHEDULERS:
        return Spread(1, world)
    if platform != "cpu" and gpus is None:
        fix = "type launcher.gpus_per_node=8, or platform=cpu"
        raise _refused("launcher.gpus_per_node", f"platform={platform}: GPUs of a node are not given", fix)
    per_node = world if platform == "cpu" else min(world, gpus or world)
    if nodes is not None:
        per_node = world // nodes
    if per_node == 0 or world % per_node or (nodes is not None and per_node * nodes != world):
        share = nodes if nodes is not None else f"{per_node} GPUs a node"
        what = "nodes" if nodes is not None else "each"
        message = f"{world} ranks of mesh={config.mesh.spec} do not divide over {share} {what}"
        raise _refused("launcher.nodes", message, "take a mesh whose ranks divide, or another number")
    if platform != "cpu" and gpus is not None and per_node > gpus:
        message = f"{world} ranks / {nodes} nodes = {per_node} a node, which has {gpus} GPUs"
        raise _refused("launcher.nodes", message, f"type launcher.nodes={-(-world // gpus)}, or leave it out")
    if per_node % config.mesh.tp:
        message = f"tp={config.mesh.tp} does not divide the {per_node} ranks of a node"
        raise _refused("mesh.tp", message, "tensor parallel ranks share a node")
    return Spread(world // per_node, per_node)


def _refused(key: str, message: str, fix: str) -> UserError:
    return UserError([Problem(key, message, fix, "PLAN-2")])

"""How the values of the table of environment variables follow from config, machine and network (ENV)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from src.code_identity import CHECKOUT
from src.config import Config
from src.errors import Problem, UserError
from src.launchers.network import Network


@dataclass(frozen=True)
class Setting:
    """What the rules of the table read."""

    config: Config
    platform: str
    """`cpu`, `cuda` or `rocm`."""
    ranks: int
    """Ranks of this launch on this machine."""
    jobs: int = 1
    """Jobs of this launch side by side on this machine."""
    cores: int = 1
    cache: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Root of the compiler caches."""
    meeting: str | None = None
    """First host of a launch over several nodes; None where all ranks share one machine."""
    network: Network | None = field(default_factory=Network)
    """Of the machine that the ranks run on; None where that is another one, which nobody asks."""

    @property
    def threads(self) -> int:
        """Threads of one rank."""
        return max(1, self.cores // (self.ranks * self.jobs))


@dataclass(frozen=True)
class Rule:
    """How a value is found."""

    words: str
    """The value, or what it follows from, for a person."""
    value: Callable[[Setting], str | None]
    """The value as text; None leaves the variable unset."""


def fixed(value: str) -> Rule:
    """A value that does not depend on the setting."""
    return Rule(f"`{value}`", lambda setting: value)


def when_bitwise(value: str) -> Rule:
    """A value under `determinism=bitwise` alone."""
    return Rule(
        f"`{value}` under `determinism=bitwise`",
        lambda setting: value if setting.config.determinism.name == "bitwise" else None,
    )


def below_cache(name: str) -> Rule:
    """A directory of its own below the cache root."""
    return Rule(f"`{name}` below the cache root", lambda setting: str(setting.cache / name))


def by_network(values: Mapping[str, str]) -> Rule:
    """A value for each of some networks."""
    words = ", ".join(f"`{value}` ({network})" for network, value in values.items())
    return Rule(words, lambda setting: values.get(setting.config.platform.network))


def connections(setting: Setting) -> str:
    """Hardware queues: more where communication of data or experts runs beside compute."""
    mesh = setting.config.mesh
    if mesh.ep > 1 and setting.config.pipeline.overlap:
        return "32"
    return "8" if mesh.dp * mesh.cp * mesh.ep > 1 else "1"


def wait_policy(setting: Setting) -> str | None:
    """PASSIVE where the threads of all jobs reach the cores; a lone rank keeps the default."""
    threads = setting.ranks * setting.jobs * setting.threads
    return "PASSIVE" if setting.ranks * setting.jobs > 1 and threads >= setting.cores else None


def network_device(setting: Setting) -> str | None:
    """Name of the device over which ranks meet: loopback on one machine, else that to the first host."""
    return None if setting.network is None else setting.network.route(setting.meeting)


LAYERS = {"ib": "InfiniBand", "roce": "Ethernet", "ainic": "Ethernet"}
"""Network → what its ports run, as the kernel calls it."""
AINIC = "ionic"
"""In the name of every AINIC; other cards beside them serve storage."""


def adapters(setting: Setting) -> str | None:
    """The ports that are up, by exact name, for NCCL takes a bare `mlx5_1` for `mlx5_10` too.

    Raises:
        UserError: ranks of several nodes are to meet over them and there is none (3).
    """
    network = setting.config.platform.network
    if setting.network is None or network not in LAYERS:
        return None
    ports = setting.network.active_ports(LAYERS[network])
    own = [port for port in ports if AINIC in port] if network == "ainic" else []
    if not ports and setting.meeting is not None:
        message = f"{network}, but no {LAYERS[network]} port in /sys/class/infiniband is up"
        fix = "type platform.network=ethernet, or look why the ports are down"
        raise UserError([Problem("platform.network", message, fix, "ENV")], code=3)
    return f"={','.join(own or ports)}" if ports else None


def plugin(setting: Setting) -> str | None:
    """AINIC's plugin for RCCL, where it is a library."""
    found = setting.network if setting.config.platform.network == "ainic" else None
    return None if found is None else found.plugin()


def built_in_plugin(setting: Setting) -> str | None:
    """The switch of a plugin that is a part of RCCL, where there is no library."""
    is_asked = setting.config.platform.network == "ainic" and setting.network is not None
    return "1" if is_asked and plugin(setting) is None else None


def traffic_class(setting: Setting) -> str | None:
    """DSCP × 4 of the class that the NIC never drops, else what AMD's guides take."""
    if setting.config.platform.network != "ainic":
        return None
    found = None if setting.network is None else setting.network.lossless_class()
    return "104" if found is None else str(4 * found)


def with_experts(value: str) -> Rule:
    """A value for models that route tokens."""
    return Rule(
        f"`{value}` for a model with experts",
        lambda setting: value if setting.config.model.num_experts > 0 else None,
    )


THREADS = Rule("max(1, cores / ranks)", lambda setting: str(setting.threads))
CHECKOUT_FIRST = Rule("this checkout first", lambda setting: str(CHECKOUT))
NOT_OURS = Rule("yours", lambda setting: None)
"""Only what the user's shell or `env.NAME` says."""
NUMBERED = Rule("of the rank", lambda setting: None)
"""Set for each rank by the agent that starts it."""

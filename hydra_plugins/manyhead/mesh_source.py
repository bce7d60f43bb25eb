"""Hydra's config source for mesh specs, so that no mesh needs a file (CFG-8)."""

from __future__ import annotations

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from src.mesh_spec import canonical, is_spec, parse


class MeshSource(ConfigSource):
    """Reads `mesh/pp2ep2` from its name."""

    @staticmethod
    def scheme() -> str:
        """Scheme of the search path entry."""
        return "mesh"

    def load_config(self, config_path: str) -> ConfigResult:
        """Sizes and canonical name of a spec; the header must have the key `package`."""
        sizes = parse(_spec(config_path))
        config = OmegaConf.create({"spec": canonical(sizes), **sizes})
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", config, {"package": None})

    def available(self) -> bool:
        """Always: names need no storage."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Only `mesh`."""
        return config_path == "mesh"

    def is_config(self, config_path: str) -> bool:
        """Whether the path is `mesh/<spec>`."""
        return config_path.startswith("mesh/") and is_spec(_spec(config_path))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Nothing: specs are beyond counting, and `mesh=glob(*)` means the files (HYD-15)."""
        return []


def _spec(config_path: str) -> str:
    return config_path.removeprefix("mesh/").removesuffix(".yaml")

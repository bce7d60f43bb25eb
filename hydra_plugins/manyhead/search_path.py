"""Where Hydra looks besides `conf/`: mesh specs by name and the site file of this machine (CFG-8, CFG-11)."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from src.conf_files import site_directory


class ManyheadSearchPath(SearchPathPlugin):
    """Appends, so that a file in `conf/` goes first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the mesh specs, and the site's directory if there is one."""
        search_path.append("manyhead-mesh", "mesh://specs")
        if site_directory().is_dir():
            search_path.append("manyhead-site", f"file://{site_directory()}")

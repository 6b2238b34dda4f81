"""The entry point of the command ``regard``: it imports the library at its first use.

``import regard.cli`` would run ``regard/__init__.py`` first, which imports PyTorch: two seconds for
``regard --help``. Here the package begins empty, and its ``__init__.py`` runs when somebody asks it
for a name.
"""

import sys
from importlib.util import find_spec, module_from_spec
from typing import Any


def main() -> None:
    """Run the command and end the process with its exit code."""
    spec = find_spec("regard")
    if spec is not None and spec.loader is not None and "regard" not in sys.modules:
        package, loader = module_from_spec(spec), spec.loader

        def load(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            del package.__dict__["__getattr__"]
            loader.exec_module(package)
            return getattr(package, name)

        package.__dict__["__getattr__"] = load
        sys.modules["regard"] = package
    from regard.cli import app

    app.main()

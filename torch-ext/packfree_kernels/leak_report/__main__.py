"""``python FOLDER/leak_report MODEL``: FOLDER is a built variant, in ``build/`` or in the Hub's cache."""

import importlib.util
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def load_package() -> str:
    """Load the package that this folder is a part of; its name is the one that kernels would give it.

    With that name a model that asks for this build's attention finds it loaded. A second copy under another name would
    define its operators twice.
    """
    package = FOLDER.parent
    # Python put these here because of how it was started; their files are no top-level modules.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() not in (FOLDER, package)]
    name = json.loads((package / "metadata.json").read_text(encoding="utf-8"))["id"]
    spec = importlib.util.spec_from_file_location(name, package / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return name


if __name__ == "__main__":
    if __package__:
        # python -m: a parent package, if any, is loaded under a name of its own.
        sys.exit(subprocess.call([sys.executable, str(FOLDER), *sys.argv[1:]]))
    sys.exit(import_module(f"{load_package()}.leak_report.cli").main())

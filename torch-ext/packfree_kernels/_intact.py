"""Refuses a shared object that is not the one that was built, before it is loaded: nothing else compares the digests.

Imported first of all modules of the package. A damaged Python file says so by itself; damaged machine code may crash
or, worse, compute something.
"""

import base64
import hashlib
import json
import os

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _check_shared_objects() -> None:
    metadata = os.path.join(_FOLDER, "metadata.json")
    if not os.path.exists(metadata):
        return
    with open(metadata, encoding="utf-8") as file:
        digest = json.load(file).get("digest") or {}
    for name, expected in digest.get("files", {}).items():
        if digest.get("algorithm") != "sha256" or not name.endswith(".so"):
            continue
        path = os.path.join(_FOLDER, name)
        if not os.path.exists(path):
            raise ImportError(f"packfree-kernels: {path} is missing; load the kernel again, or build it again")
        with open(path, "rb") as file:
            found = base64.b64encode(hashlib.sha256(file.read()).digest()).decode()
        if found != expected:
            # In a Hugging Face cache the file is a link to the downloaded content, which would be used again.
            raise ImportError(
                f"packfree-kernels: {name} is damaged (sha256 {found}, metadata.json says {expected}); "
                f"delete {os.path.realpath(path)} and load the kernel again"
            )


_check_shared_objects()

"""An object as a stock forward is to see it for one call."""

from typing import Any, Dict


class View:
    """``viewed`` with other values of some attributes; nothing is written to it."""

    def __init__(self, viewed: Any, values: Dict[str, Any]) -> None:
        self._viewed = viewed
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._viewed, name)

"""A list of attribute replacements that can be taken back."""

from typing import Any, List, Tuple


class UndoList:
    """Replaces attributes and remembers what was there.

    Undoing runs backwards and touches an attribute only while it still holds what was put there: whatever someone else
    laid on top stays, and calls our replacement underneath, which passes straight through once the hooks are off.
    """

    def __init__(self) -> None:
        self._entries: List[Tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``; ``owner`` must have the attribute in its own ``__dict__``."""
        self._entries.append((owner, name, vars(owner)[name], value))
        setattr(owner, name, value)

    def undo_all(self) -> None:
        while self._entries:
            owner, name, before, ours = self._entries.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, before)

"""Completes the flags and words after a magic's name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["FlagCompleter"]

_MAGIC_LINE = re.compile(r"\s*%%?(\w+)\s(?:.*\s)?(\S*)$")


class FlagCompleter:
    """`words` maps a magic's name to its flags and words."""

    def __init__(self, shell: InteractiveShell, words: Mapping[str, Iterable[str]]) -> None:
        self._shell = shell
        self._words = words
        self._matcher: Any = None

    def install(self) -> None:
        """Add the matcher, where IPython supports matchers (8.6 and later)."""
        try:
            from IPython.core.completer import SimpleCompletion, context_matcher  # noqa: PLC0415 - not in IPython 7
        except ImportError:
            return

        @context_matcher(identifier="torchdebug_magics.flags")
        def flags(context: CompletionContext) -> Any:
            found = self.matches(context.text_until_cursor)
            return {"completions": [SimpleCompletion(text, type="option") for text in found], "suppress": bool(found)}

        self._matcher = flags
        self._shell.Completer.custom_matchers.append(flags)

    def uninstall(self) -> None:
        """Remove the matcher."""
        if self._matcher is not None:
            self._shell.Completer.custom_matchers.remove(self._matcher)
            self._matcher = None

    def matches(self, line: str) -> list[str]:
        """Completions for `line`, the text up to the cursor."""
        match = _MAGIC_LINE.match(line)
        if match is None:
            return []
        name, begun = match.groups()
        words = [word for word in self._words.get(name, ()) if word.startswith(begun)]
        # Where a value may stand, flags are only offered once a dash is there; a word such as `doctor` at once.
        return [word for word in words if begun.startswith("-") or not word.startswith("-")]

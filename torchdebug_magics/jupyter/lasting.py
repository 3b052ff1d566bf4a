"""Sessions from ``%name on`` to ``%name off``, over any number of cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.error import UsageError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from torchdebug_magics.jupyter.showing import ShownSession

__all__ = ["LastingSessions"]


class LastingSessions:
    """Lasting sessions, at most one for each magic; after each cell, a session may show a page."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._on: dict[str, ShownSession] = {}
        self._after = self._after_cell  # kept, as in CellSessions

    def install(self) -> None:
        """Register for the end of each cell."""
        self._shell.events.register("post_run_cell", self._after)

    def uninstall(self) -> None:
        """Exit all sessions and unregister."""
        for name in reversed(tuple(self._on)):
            self.off(name)
        self._shell.events.unregister("post_run_cell", self._after)

    def on(self, name: str, session: ShownSession) -> None:
        """Enter `session`, until `off`."""
        __tracebackhide__ = True
        if name in self._on:
            msg = f"%{name} is on already: `%{name} off` ends it"
            raise UsageError(msg)
        self._on[name] = session  # first, so that an interrupt cannot lose it
        try:
            session.__enter__()
        except BaseException:
            self.off(name)
            raise

    def off(self, name: str) -> None:
        """Exit the session, which shows its report."""
        __tracebackhide__ = True
        session = self._on.get(name)
        if session is None:
            msg = f"%{name} is not on: `%{name} on` begins"
            raise UsageError(msg)
        session.__exit__(None, None, None)
        del self._on[name]  # last: what an interrupt cut short is finished by another `off`

    def live(self, name: str) -> object | None:
        """A snapshot of the open session, or None."""
        return self._on[name].live() if name in self._on else None

    def _after_cell(self, *_: object) -> None:
        for session in tuple(self._on.values()):
            session.after_cell()

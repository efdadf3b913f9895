"""Work beside training: one piece at a time, in a thread. Knows not what it is."""

import threading
from collections.abc import Callable
from types import TracebackType

from transformer_xl.console import say


class Background:
    """One piece of work at a time, beside the main thread. Whoever leaves the block waits for it; only a second Ctrl-C does not."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.given_up = threading.Event()
        """Whether nobody waits for anything any more: work that waits for other ranks looks here."""

    def begin(self, work: Callable[[], None]) -> None:
        self.wait()
        self._thread = threading.Thread(target=self._do, args=(work,), name="saving", daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raises what went wrong, once it has."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, Exception):
            self.given_up.set()
            try:
                self.wait()
            except Exception as other:
                if other is not error:
                    say(f"the last checkpoint could not be written either ({other}); the one before it is whole")

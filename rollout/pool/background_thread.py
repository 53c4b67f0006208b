"""Repeats a piece of work in a thread of its own while the caller does something else."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_POLL_S = 0.2
"""Pause after a piece of work that found nothing to do."""


@contextmanager
def repeated_in_background(work: Callable[[], bool], *, name: str) -> Iterator[None]:
    """While the body runs, call `work` again and again; it returns False if it found nothing to do.

    Args:
        work: one piece of work; after an error it is not called again.
        name: of the thread, for stacks and notes.

    Raises:
        Exception: the error of `work`, at the end of a body that succeeded. An error of the body has it as a note.
    """
    ends, failures = threading.Event(), list[Exception]()

    def repeat() -> None:
        try:
            while not ends.is_set():
                if not work():
                    ends.wait(_POLL_S)
        except Exception as error:  # raised below, in the caller's thread
            failures.append(error)

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        error.add_note(f"the {name} meanwhile: {failures[0] if failures else 'no failure'}")
        raise
    finally:
        ends.set()
        thread.join()
    if failures:
        raise failures[0]

"""Waits for calls of Ray by short looks (`history.patience`): a stop of this process makes no call late."""

import ray

from history.patience import Patience


def wait_for_all(
    refs: list[ray.ObjectRef], *, timeout_s: float, fetch_local: bool = True
) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
    """Calls that have ended, and late ones."""
    done: list[ray.ObjectRef] = []
    late, patience = refs, Patience(timeout_s)
    while late:
        done, late = ray.wait(refs, num_returns=len(refs), timeout=patience.look_s(), fetch_local=fetch_local)
        if patience.is_over():
            break
    return done, late

"""Python imports this at its start if the folder is on PYTHONPATH: the wall clock jumps by two hours every 0.7 s.

All processes of the machine see the same jumps. Only `time.time` jumps: `time.monotonic` does not follow a clock that
somebody sets.
"""

import time

_JUMP_S = 3600.0
_EVERY_S = 0.7
_time = time.time


def _jumping() -> float:
    return _time() + (_JUMP_S if int(time.monotonic() / _EVERY_S) % 2 else -_JUMP_S)


time.time = _jumping

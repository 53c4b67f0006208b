"""Bytes that all processes of the cluster have put into Ray's object store.

Ray has no public function for this counter. Small objects, of up to 100 kB, travel inside calls and are not counted.
"""

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address


def created_bytes() -> int:
    """Bytes since the start of the cluster."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.cumulative_created_bytes)

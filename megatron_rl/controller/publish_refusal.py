"""The error of a publish that an engine refused."""

from rollout.failures import PlacedError


class PublishRefusedError(PlacedError):
    """Metadata, checksums, weight sums or the probe did not match. No token was sampled from the refused weights."""

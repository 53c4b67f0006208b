"""The error of a publish that engines did not accept."""

from rollout.failures import PlacedError


class PublishRefusedError(PlacedError):
    """Metadata, checksums, sums or the probe did not fit; no token was sampled from the weights."""

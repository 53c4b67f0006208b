"""What damage of a checkpoint is. Pure: the launcher, which does not import torch, tells it from other errors."""


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing, or is not what a save wrote. Every further attempt finds the same."""


def may_pass(error: BaseException) -> bool:
    """Whether a read that has failed may succeed later: the disk, rights or memory failed, not the checkpoint."""
    if isinstance(error, RuntimeError):  # torch's, which has this name in it if an archive is damaged
        return "PytorchStreamReader" not in str(error)
    return isinstance(error, (OSError, MemoryError)) and not isinstance(error, FileNotFoundError)

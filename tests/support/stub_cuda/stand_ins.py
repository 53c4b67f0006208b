"""Answers where host code reads what a kernel of a device would have computed. Each names its operation.

They are installed when a module is imported (`site/sitecustomize.py`), so that only the modules that need one have it.
Every process of a rehearsal imports this file, before torch.
"""

from collections.abc import Callable
from types import ModuleType


def install(module: ModuleType) -> None:
    """Install the stand-ins that belong to a module, after its import."""
    INSTALLERS[module.__name__](module)


def _outputs(module: ModuleType) -> None:
    """vLLM selects rows by a mask on the device, whose number of rows a kernel counts."""
    import torch

    tensors = module.LogprobsTensors
    tensors.filter = lambda self, mask: tensors(*(part[torch.from_numpy(mask)] for part in self[:3]))


def _learner(module: ModuleType) -> None:
    """Lengths that a kernel would have computed are garbage; cuDNN's attention needs a real driver."""
    import torch
    import transformer_engine.pytorch as te

    reduce, repeat = torch.segment_reduce, torch.Tensor.repeat_interleave

    def segment_reduce(data, kind, *, lengths=None, **options):
        return reduce(data.cpu(), kind, lengths=lengths.cpu(), **options).to(data.device)

    def repeat_interleave(self, *args, **options):
        if not (args and isinstance(args[0], torch.Tensor)):
            return repeat(self, *args, **options)
        given = [value.cpu() if isinstance(value, torch.Tensor) else value for value in args]
        return repeat(self.cpu(), *given, **options).to(self.device)

    def attention(self, query, key, value, *args, **options):
        copies = query.shape[-2] // value.shape[-2]
        out = value.repeat_interleave(copies, dim=-2) if copies > 1 else value * 1.0
        return out.reshape(*query.shape[:-2], -1)

    torch.segment_reduce = segment_reduce
    torch.Tensor.repeat_interleave = repeat_interleave
    te.DotProductAttention.forward = attention


def _formats(module: ModuleType) -> None:
    """Whether all magnitudes are finite is the result of a reduction on the device."""
    module._finite = lambda amax: amax


def _checksum(module: ModuleType) -> None:
    """Checksums of buckets on a device; computed on the host, they tell whether the right bytes have arrived."""
    multilinear = module.multilinear
    module.multilinear = lambda payload: multilinear(payload.cpu())


INSTALLERS: dict[str, Callable[[ModuleType], None]] = {
    "vllm.v1.outputs": _outputs,
    "rollout.transports.checksum": _checksum,
    "megatron_rl.trainer.learner": _learner,
    "megatron_rl.quantization.formats": _formats,
}
"""By the module whose import installs the stand-ins."""

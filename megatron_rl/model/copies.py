"""Copies from host memory to a device for which the host does not wait."""

import torch


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`.

    A GPU copies from pinned memory, which torch keeps until the copy is done; later work of the stream follows it.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

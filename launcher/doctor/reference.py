"""Log-probabilities by Hugging Face's implementation of a model, which shares no code with trainer and engines."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM


def reference_logprobs(
    directory: str, token_ids: Sequence[int], dtype: Literal["bf16", "fp32"]
) -> npt.NDArray[np.float32]:
    """Log-probabilities at temperature 1 of each token after the first, [len(token_ids) - 1], on the CPU.

    The whole model is loaded into host memory, in `dtype`: 65 GB for 32B parameters in BF16.
    """
    weights = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=weights).eval()
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    return np.asarray(logprobs.numpy(), dtype=np.float32)

"""Makes `fp8_block.npz`: what the reference of Transformer Engine's own tests says of some weights.

`python tests/data/make_fp8_block.py TRANSFORMER_ENGINE` with a checkout of https://github.com/NVIDIA/TransformerEngine
(the file was made at commit d0067d0d, whose rule is that of 2.12); its reference needs torch and nothing else.
"""

import sys
from pathlib import Path

import numpy as np
import torch


def cases() -> dict[str, torch.Tensor]:
    """Whole and cut blocks, both dtypes, magnitudes over many powers of two, zeros and the smallest numbers."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(2).exp2()

    edge = draw(129, 130)
    edge[:128, :128] = 0
    edge[128:, :128] *= 1e-38
    edge[:128, 128:] *= 1e30
    return {
        "whole_float32": draw(128, 256),
        "cut_bfloat16": draw(130, 200).bfloat16(),
        "edge_float32": edge,
        "edge_bfloat16": edge.bfloat16(),
    }


def main() -> None:
    sys.path.insert(0, str(Path(sys.argv[1]) / "tests" / "pytorch"))
    from references.blockwise_quantizer_reference import BlockwiseQuantizerReference

    arrays: dict[str, np.ndarray] = {"names": np.array(sorted(cases()))}
    for name, weight in cases().items():
        stored = weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight
        arrays[f"{name}/weight"] = stored.numpy()
        for kind, power_of_two in (("power", True), ("exact", False)):
            found = BlockwiseQuantizerReference().quantize(
                weight, torch.float8_e4m3fn, pow_2_scales=power_of_two, munge_scale_shapes=False
            )
            arrays[f"{name}/{kind}/codes"] = found.data.view(torch.uint8).numpy()
            arrays[f"{name}/{kind}/inverse"] = found.scale.numpy()
    np.savez_compressed(Path(__file__).with_name("fp8_block.npz"), **arrays)


if __name__ == "__main__":
    main()

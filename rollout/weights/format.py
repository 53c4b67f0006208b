"""How the weights of a model travel to an engine: which tensors get 8-bit codes, and with which scales.

The trainer, which makes the codes, and the engine, which checks them, read `engine.format` and its exceptions here.
Pure: no torch.

Shape legend: N output channels, K inputs, [P, Q] the grid of a matrix's scales.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, get_args

from rollout.config import EngineConfig, Format
from rollout.weights.manifest import stack_of

FP8_BLOCK: Final = 128
"""Rows and columns of a block of `fp8_block`."""

_WHOLE_ROW: Final = 1 << 62

FUSED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices that vLLM holds as one, so either all or none of them have 8-bit codes."""

FUSED_EXPERTS: Final = ("gate_proj", "up_proj", "down_proj")
"""The same for the experts of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLayout:
    """How a matrix [N, K] is stored in 8 bits: codes of its shape, and a float32 scale for each block."""

    dtype: str
    """Dtype of the codes, a key of `rollout.weights.manifest.DTYPE_BYTES`."""
    scale_suffix: str
    """`X.weight` has its scales in `X.weight` + suffix, as in checkpoints of this layout."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape [P, Q] of the scales of a matrix."""
        rows, columns = (-(-size // block) for size, block in zip(shape, self.block, strict=True))
        return rows, columns

    def touched(self, start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, slice]:
        """Blocks that a box of the matrix touches, as an index into the grid."""
        rows, columns = (
            slice(first // block, -(-(first + size) // block))
            for first, size, block in zip(start, shape, self.block, strict=True)
        )
        return rows, columns

    def begun(self, start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, slice]:
        """Blocks whose first row and column lie in a box, as an index into the grid; disjoint boxes share none."""
        rows, columns = (
            slice(-(-first // block), -(-(first + size) // block))
            for first, size, block in zip(start, shape, self.block, strict=True)
        )
        return rows, columns

    def cuts(self, start: tuple[int, ...]) -> bool:
        """Whether a box that begins there shares a block with another box."""
        return any(first % block for first, block in zip(start, self.block, strict=True))


LAYOUTS: Final[dict[str, CodeLayout]] = {
    "int8": CodeLayout(dtype="int8", scale_suffix="_scale", block=(1, _WHOLE_ROW)),
    "fp8_channel": CodeLayout(dtype="float8_e4m3fn", scale_suffix="_scale", block=(1, _WHOLE_ROW)),
    "fp8_block": CodeLayout(dtype="float8_e4m3fn", scale_suffix="_scale_inv", block=(FP8_BLOCK, FP8_BLOCK)),
}
"""Layouts of the 8-bit formats, by format name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A format and its exceptions.

    Raises:
        ValueError: there is no such format.
    """

    name: Format
    bf16_first_layers: int = 0
    """Number of decoder layers, from the first, whose linears stay BF16."""
    bf16_last_layers: int = 0
    """Number of decoder layers, up to the last, whose linears stay BF16."""
    bf16_modules: tuple[str, ...] = ()
    """Patterns (`*` for anything) of names of further modules that stay BF16."""

    def __post_init__(self) -> None:
        if self.name not in get_args(Format):
            raise ValueError(f"there is no format {self.name!r}; use {', '.join(get_args(Format))}")

    @classmethod
    def of(cls, config: EngineConfig) -> "WeightFormat":
        """The format of an engine's configuration."""
        return cls(
            name=config.format,
            bf16_first_layers=config.bf16_first_layers,
            bf16_last_layers=config.bf16_last_layers,
            bf16_modules=config.bf16_modules,
        )

    @property
    def layout(self) -> CodeLayout | None:
        """Layout of the codes; None for `bf16`."""
        return LAYOUTS.get(self.name)

    def excepts(self, tensor_name: str, num_layers: int) -> bool:
        """Whether a linear of a decoder layer keeps BF16 weights, by the Hugging Face name of one of its tensors.

        The experts of a layer are one module: patterns match their names without expert numbers.
        """
        module = stack_of(tensor_name).rpartition(".")[0]
        layer = int(module.partition(".layers.")[2].partition(".")[0])
        return (
            layer < self.bf16_first_layers
            or layer >= num_layers - self.bf16_last_layers
            or any(fnmatchcase(module, pattern) for pattern in self.bf16_modules)
        )

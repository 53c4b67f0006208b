"""The critic's model: the policy's architecture with a head of one column instead of the output layer.

The value of a response token is that of the state before it, so it comes from the row that predicts the token
(`PackedBatch.score_rows`). Values are FP32.

The head has the name of the output layer that it replaces, so that Megatron's code for checkpoints finds it. It starts
at zero: all first values are 0 under every partition, and the first update moves the head alone.

Every tensor-parallel rank holds the whole head. Under sequence parallelism each applies it to its own rows, and only
values are gathered. The head's gradients are then parts, which Megatron sums because the parameter is marked, as it
sums those of norms. Otherwise all ranks compute the same values and gradients.

A tied model has no output layer of its own; its critic shares nothing between embedding and head.
"""

from dataclasses import replace

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import ParallelConfig
from megatron_rl.model.build import ModelOptions, PackedModel, prepare
from megatron_rl.model.packed_batch import PackedBatch
from megatron_rl.model.parallel import Position
from megatron_rl.model.spec import ModelSpec


class ValueHead(torch.nn.Module):
    """The last layer: one number from each hidden state."""

    def __init__(self, hidden_size: int, *, like: torch.Tensor, sequence_parallel: bool) -> None:
        """A head of zeros with the dtype and the device of `like`."""
        super().__init__()
        self.weight = torch.nn.Parameter(like.new_zeros(1, hidden_size))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [...], FP32."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float())[..., 0]


class ValueModel(PackedModel):
    """One chunk of the critic, which ends in values."""

    def __init__(
        self, spec: ModelSpec, config: TransformerConfig, *, parallel: ParallelConfig, position: Position
    ) -> None:
        """Build the layers of `position`'s pipeline stage, and on the last stage the head."""
        super().__init__(replace(spec, tied=False), config, parallel=parallel, position=position)
        if self.post_process:
            like: torch.Tensor = self.get_parameter("output_layer.weight")
            self.output_layer = ValueHead(spec.hidden_size, like=like, sequence_parallel=config.sequence_parallel)

    def forward(self, batch: PackedBatch, *, temperature: float | None = None) -> torch.Tensor:
        """Hidden states before the last stage, values [R] on it; values have no temperature."""
        del temperature
        hidden = self.hidden(batch)
        if not self.post_process:
            return hidden
        values: torch.Tensor = self.output_layer(hidden[:, 0])
        if self.config.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return values.index_select(0, batch.score_rows)


def build_value(
    spec: ModelSpec, parallel: ParallelConfig, position: Position, options: ModelOptions
) -> list[ValueModel]:
    """Build the critic's chunks of this rank, as `build` does the policy's; every rank of the partition calls it.

    Weights are uninitialised but for the head: load them (`megatron_rl.weights.hf_load`).
    """
    return [ValueModel(spec, prepare(spec, parallel, options), parallel=parallel, position=position)]

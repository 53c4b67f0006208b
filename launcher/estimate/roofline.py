"""What all estimates of time share: the stated shares of peaks, and work of a model by token. Pure.

Work is counted in floating-point operations; a multiply-add is two. Attention is causal: a query meets half of its
sequence on average.
"""

from dataclasses import dataclass

from launcher.estimate.hardware import Gpu
from launcher.estimate.lengths import Lengths
from megatron_rl.model.spec import ModelSpec
from rollout.weights.format import WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Inputs of an estimate of time beside the configuration. None is measured."""

    gpu: Gpu
    gpus_per_node: int
    lengths: Lengths
    product_share: float
    """Share of the peak that matrix products reach."""
    bandwidth_share: float
    """Share of the datasheet's bandwidth that memory and links reach."""
    forward_overhead_s: float
    """Seconds of an engine's forward outside of kernels: scheduling, sampling, launches."""
    all_reduce_latency_s: float
    """Seconds of an all-reduce without bytes."""
    publish_overhead_s: float
    """Seconds of a publish outside of copies and products: manifests, checksums, sums, the probe."""
    verified_tokens: float
    """Tokens that an engine computes for a request in one forward, rejected drafts included."""

    @property
    def memory_bytes_s(self) -> float:
        """Bytes per second between a device and its memory."""
        return self.bandwidth_share * self.gpu.memory_bytes_s

    @property
    def nvlink_bytes_s(self) -> float:
        """Bytes per second between devices of a node."""
        return self.bandwidth_share * self.gpu.nvlink_bytes_s

    @property
    def nic_bytes_s(self) -> float:
        """Bytes per second between nodes, for each device."""
        return self.bandwidth_share * self.gpu.nic_bytes_s

    @property
    def pcie_bytes_s(self) -> float:
        """Bytes per second between a device and its host."""
        return self.bandwidth_share * self.gpu.pcie_bytes_s

    def link_bytes_s(self, num_ranks: int) -> float:
        """Bandwidth between `num_ranks` devices that are filled in order."""
        return self.nvlink_bytes_s if num_ranks <= self.gpus_per_node else self.nic_bytes_s

    def product_s(self, flops: float, *, eight_bit: float = 0.0, int8: bool = False) -> float:
        """Seconds of products on one device; `eight_bit` is the share of them with 8-bit inputs.

        Without products of that format, the device multiplies in BF16.
        """
        peak = (self.gpu.int8_flops if int8 else self.gpu.fp8_flops) or self.gpu.bf16_flops
        fast = flops * eight_bit / peak
        slow = flops * (1.0 - eight_bit) / self.gpu.bf16_flops
        return (fast + slow) / self.product_share


def linear_weights(spec: ModelSpec) -> int:
    """Weights of decoder layers that multiply each token; of experts, those that the token is sent to."""
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    networks = 1 if spec.experts is None else spec.experts.per_token
    router = 0 if spec.experts is None else spec.experts.count * spec.hidden_size
    attention = spec.hidden_size * (2 * query + 2 * key_value)
    return spec.num_layers * (attention + networks * 3 * spec.hidden_size * spec.ffn_size + router)


def output_weights(spec: ModelSpec) -> int:
    """Weights of the output layer."""
    return spec.vocab_size * spec.hidden_size


def attention_flops(spec: ModelSpec, pairs: float) -> float:
    """Operations of attention scores and values for `pairs` of query and key."""
    return 4.0 * spec.num_layers * spec.num_heads * spec.head_dim * pairs


def eight_bit_share(spec: ModelSpec, format: WeightFormat) -> float:
    """Share of the linear layers with 8-bit products; exceptions by name are not counted."""
    if format.layout is None:
        return 0.0
    return max(0.0, 1.0 - (format.bf16_first_layers + format.bf16_last_layers) / spec.num_layers)


def all_reduce_bytes(num_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank of a ring sends."""
    return 2.0 * num_bytes * (num_ranks - 1) / num_ranks

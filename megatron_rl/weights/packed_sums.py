"""Adds up the products of boxes while one trainer rank packs a publish; see `rollout.weights.fingerprint`.

Products stay on the device of the weights. They are folded to sums at the end, after one transfer to the host.
"""

import torch

from megatron_rl.weights.shards import Shard
from rollout.weights.fingerprint import Sums, fold
from rollout.weights.manifest import Box


class PackedSums:
    """Products of the rows of each shard with signs, over the boxes that this rank has packed."""

    def __init__(self) -> None:
        self.are_wanted = self._are_complete = False
        self._products: dict[Shard, torch.Tensor] = {}
        """Float32 [S, rows of the shard]; zero in rows that other ranks pack."""

    def begin(self, wanted: bool) -> None:
        """Begin a publish; without `wanted` it has no sums."""
        self.are_wanted, self._are_complete = wanted, False
        self._products = {}

    def add(self, shard: Shard, box: Box, products: torch.Tensor) -> None:
        """Add the products of a box, [S, rows of the box]. Boxes side by side add up in the same rows."""
        if shard not in self._products:
            self._products[shard] = products.new_zeros(len(products), shard.shape[0])
        first = box.start[0] - shard.hf_start[0]
        self._products[shard][:, first : first + box.shape[0]] += products

    def end(self) -> None:
        """All boxes have been packed."""
        self._are_complete = self.are_wanted

    def fingerprint(self) -> dict[str, Sums]:
        """Sums of what was packed, by tensor.

        Raises:
            RuntimeError: the last publish was without sums, or has failed.
        """
        if not self._are_complete:
            raise RuntimeError("the last publish has no sums: it failed, or was sent without them")
        found: dict[str, Sums] = {}
        shards = list(self._products)
        if not shards:
            return found
        joined = torch.cat([self._products[shard].flatten() for shard in shards]).cpu()
        parts = torch.split(joined, [self._products[shard].numel() for shard in shards])
        for shard, part in zip(shards, parts, strict=True):
            box = Box(start=shard.hf_start, shape=shard.shape)
            sums = fold(part.view(-1, shard.shape[0]), box, shard.hf_full_shape)
            found[shard.hf_name] = found[shard.hf_name] + sums if shard.hf_name in found else sums
        return found

"""From Megatron parameters to wire buckets: names, split rules, quantisation, resharding, publishing."""

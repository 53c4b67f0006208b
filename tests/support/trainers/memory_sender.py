"""A transport that is a dictionary."""

import torch


class MemorySender:
    """Sender and inbox of one or many ranks; its memory is not zero initially."""

    fault = ""

    def __init__(self):
        self.buckets = {}

    def open(self, weight_version, buckets):
        self.buckets |= {bucket.index: torch.full((bucket.num_bytes,), 7, dtype=torch.uint8) for bucket in buckets}

    def buffer(self, index):
        return self.buckets[index]

    def commit(self, index):
        pass

    def finish(self):
        return "memory"

    @property
    def sent_bytes(self):
        return sum(len(data) for data in self.buckets.values())

    def abandon(self):
        self.buckets = {}

    @property
    def contents(self):
        return {index: data.numpy().tobytes() for index, data in self.buckets.items()}

    def take(self, bucket):
        return self.buckets[bucket.index]

"""The fixed prompt that every publish is proven with. Pure."""


def probe_tokens(vocab_size: int, num_tokens: int) -> list[int]:
    """Token ids spread over the whole vocabulary, the same in every run."""
    return [(7919 * (index + 1)) % vocab_size for index in range(num_tokens)]

"""From a Hugging Face configuration to a Megatron GPTModel and its token scores."""

"""What moves buckets from trainer ranks to engine ranks; a transport knows bytes, never tensors."""

"""Files of a checkpoint: written from copies, read without running code, cut in boxes of the model's tensors."""

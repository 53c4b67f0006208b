"""The commands run, sft, eval and export, and the parts that they share."""

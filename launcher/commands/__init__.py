"""The commands run, sft, eval and export, and the code that they share."""

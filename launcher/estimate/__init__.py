"""Memory and time of a run from its configuration, the model's `config.json` and figures of the hardware. Pure."""

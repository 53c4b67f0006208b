"""The wire format of weights that trainers and engines share: formats, manifest and fingerprints."""

"""Token ids that end a response, read from the files of a Hugging Face directory without a heavy library."""

import json
from pathlib import Path


def end_of_sequence_ids(directory: str) -> tuple[int, ...]:
    """Token ids that end a response, from `config.json`, `generation_config.json` and the tokenizer; sorted."""
    root = Path(directory)
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (root / name).exists():
            value = json.loads((root / name).read_text()).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids | _tokenizer_end_ids(root)))


def _tokenizer_end_ids(root: Path) -> set[int]:
    settings, vocabulary = root / "tokenizer_config.json", root / "tokenizer.json"
    if not (settings.exists() and vocabulary.exists()):
        return set()
    token = json.loads(settings.read_text()).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = json.loads(vocabulary.read_text()).get("added_tokens", [])
    return {entry["id"] for entry in added if entry["content"] == content}

"""A tokenizer gives the ids and texts of its `tokenizer.json`, whatever class its directory declares.

The reference is the library `tokenizers`, which reads that file and nothing else.
"""

import json
import logging
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.data.tokenizer import Tokenizer
from rollout.data.tokenizer_file import TEXT
from tests.support.byte_tokenizer import tokenizer_in, write_byte_tokenizer

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = rf"{WORDS}|\p{{N}}|{REST}"
LLAMA_3 = rf"{WORDS}|\p{{N}}{{1,3}}|{REST}"
SAMPLES = (TEXT, "def f(x):\n    return x + 123\n", "What is 12 + 34?", "Größe  \t日本 ")


def byte_level(pattern: str, *, composes: bool = False) -> tokenizers.Tokenizer:
    """A tokenizer of bytes with a few merges, cut as `pattern` says: Qwen's and Llama 3's are so."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("1", "2"), ("12", "3"), ("4", "5"), ("45", "6"), ("Ġ", "d")]
    vocabulary |= {left + right: len(vocabulary) + at for at, (left, right) in enumerate(merges)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    if composes:
        core.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    return core


def pieces() -> tokenizers.Tokenizer:
    """A tokenizer of pieces with bytes for what is left, as Llama 2's."""
    symbols = [
        "<unk>",
        "<|end|>",
        *[f"<0x{byte:02X}>" for byte in range(256)],
        *"▁abcdefghijklmnopqrstuvwxyz0123456789=",
    ]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    merges = [("▁", "a"), ("▁", "▁"), ("i", "t")]
    vocabulary |= {left + right: len(vocabulary) + at for at, (left, right) in enumerate(merges)}
    core = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<unk>", "<|end|>"])
    return core


def load(directory: Path, core: tokenizers.Tokenizer, model_type: str, declared: str) -> Tokenizer:
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>").save_pretrained(directory)
    core.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config.pop("backend", None)
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": declared}))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 400}))
    return tokenizer_in(directory)


def assert_as_written(loaded: Tokenizer, file: Path) -> None:
    written = tokenizers.Tokenizer.from_file(str(file))
    written.no_truncation()
    written.no_padding()
    for text, ids in zip(SAMPLES, loaded.encode(SAMPLES, add_special_tokens=False), strict=True):
        assert ids.tolist() == written.encode(text, add_special_tokens=False).ids
        assert loaded.decode(ids) == written.decode(ids.tolist())


@pytest.mark.parametrize(
    "declared", ["LlamaTokenizerFast", "LlamaTokenizer", "PreTrainedTokenizerFast", "Qwen2Tokenizer"]
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("pattern", [QWEN, LLAMA_3])
def test_a_declared_class_changes_no_id(tmp_path: Path, pattern: str, model_type: str, declared: str) -> None:
    assert_as_written(load(tmp_path, byte_level(pattern), model_type, declared), tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("core", "model_type", "declared"),
    [
        (byte_level(QWEN, composes=True), "qwen2", "Qwen2Tokenizer"),
        (byte_level(QWEN, composes=True), "qwen3_moe", "Qwen2TokenizerFast"),
        (byte_level(QWEN), "qwen3", "Qwen2Tokenizer"),
        (byte_level(LLAMA_3), "llama", "PreTrainedTokenizerFast"),
        (pieces(), "llama", "LlamaTokenizer"),
    ],
)
def test_tokenizers_of_the_families_are_loaded_as_they_are_declared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, core: tokenizers.Tokenizer, model_type: str, declared: str
) -> None:
    loaded = load(tmp_path, core, model_type, declared)
    assert caplog.messages == []
    assert_as_written(loaded, tmp_path / "tokenizer.json")


def test_a_class_that_is_not_used_is_logged_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rollout.data.tokenizer"):
        load(tmp_path, byte_level(LLAMA_3), "qwen2", "LlamaTokenizerFast")
    (line,) = [record.message for record in caplog.records if record.name == "rollout.data.tokenizer"]
    assert f"{tmp_path / 'tokenizer.json'} is used; AutoTokenizer would replace it by Qwen2Tokenizer" in line


def test_a_file_that_cuts_or_pads_is_no_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    core = byte_level(LLAMA_3)
    core.enable_truncation(4)
    core.enable_padding(length=500, pad_token="<|end|>")
    loaded = load(tmp_path, core, "llama", "PreTrainedTokenizerFast")
    assert [message for message in caplog.messages if "is used" in message] == []
    assert_as_written(loaded, tmp_path / "tokenizer.json")


def test_a_tokenizer_that_no_class_loads_as_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(tmp_path, byte_level(LLAMA_3), "llama", "PreTrainedTokenizerFast")
    monkeypatch.setattr("rollout.data.tokenizer.differs_from_file", lambda loaded, file: "a text has 2 tokens")
    with pytest.raises(ValueError, match=r"loads another tokenizer than .*tokenizer\.json \(a text has 2 tokens\)"):
        tokenizer_in(tmp_path)


def test_responses_are_decoded_without_the_clean_up_that_a_directory_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before `transformers` 5.19 it took spaces from texts of BPE tokenizers: `' '.join` became `''.join`."""
    loaded = load(tmp_path, byte_level(LLAMA_3), "llama", "PreTrainedTokenizerFast")
    hub, asked = loaded._hub, []
    decode = hub.decode
    monkeypatch.setattr(hub, "decode", lambda ids, **options: asked.append(options) or decode(ids, **options))
    text = "s = ' '.join(a) , b . it 's"
    (ids,) = loaded.encode([text], add_special_tokens=False)
    assert loaded.decode(ids) == text
    assert asked == [{"skip_special_tokens": True, "clean_up_tokenization_spaces": False}]


def test_the_text_is_composed() -> None:
    assert unicodedata.normalize("NFC", TEXT) == TEXT


def test_texts_that_are_encoded_in_parts_have_the_ids_of_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = tokenizer_in(tmp_path)
    texts = ["a" * length for length in (5, 0, 900, 3, 40)]
    alone = [tokenizer.encode([text], add_special_tokens=False)[0].tolist() for text in texts]
    monkeypatch.setattr("rollout.data.tokenizer._TEXTS_AT_ONCE", 2)
    assert [ids.tolist() for ids in tokenizer.encode(texts, add_special_tokens=False)] == alone
    assert tokenizer.encode([], add_special_tokens=False) == []

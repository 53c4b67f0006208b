"""Reads and validates a Hugging Face `config.json`, before any process or tensor exists.

`read_model_spec` turns the file into a `ModelSpec`, the architecture for the model builder, the table of weight names
and the memory arithmetic. Features that the trainer does not implement exactly (other families, sliding windows, other
rotary scalings, other biases) are refused by name, so that no run trains a different model silently. So are keys that
vLLM honours and transformers ignores: an engine would sample from another model than the trainer's.

Pure: imports neither torch nor megatron.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from megatron_rl.config import ParallelConfig

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]

VOCAB_ALIGNMENT = 64
"""Vocabulary rows of every tensor-parallel rank are padded to a multiple of this, on every device."""

_ONLY_OF_VLLM: dict[str, tuple[object, ...]] = {"dual_chunk_attention_config": (), "is_causal": (True,)}
"""Keys that vLLM's models read and transformers' do not, with the values that change nothing."""

_ONLY_OF_VLLM_IN: dict[Family, dict[str, tuple[object, ...]]] = {
    "llama": {"sliding_window": (), "logit_scale": (1,), "bias": (False,), "qkv_bias": (False,)},
    "qwen2": {"qk_norm": (False,)},
    "qwen3_moe": {"shared_expert_intermediate_size": (0,)},
}
"""The same for models of one family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama-3 scaling of rotary frequencies: those of long wavelengths are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts, which replaces the feed-forward network of every decoder layer."""

    count: int
    per_token: int
    ffn_size: int
    """Width of one expert."""
    normalised: bool
    """Probabilities of the chosen experts are scaled to a sum of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Architecture of a decoder-only model, in Hugging Face's terms."""

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of the feed-forward network, or of one expert."""
    vocab_size: int
    """Rows of the saved embedding."""
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    """RMS norms over each head's query and key."""
    rms_eps: float
    max_positions: int
    experts: Experts | None = None
    """None in a dense model."""

    def padded_vocab_size(self, tensor: int) -> int:
        """Rows of Megatron's embedding over all `tensor` ranks, padding included."""
        multiple = VOCAB_ALIGNMENT * tensor
        return -(-self.vocab_size // multiple) * multiple


class _Reader:
    """Typed access to the keys of one `config.json`; errors name the file and the key."""

    def __init__(self, path: Path, values: dict[str, object]) -> None:
        self.path = path
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{self.path}: {key} {self._found(key)}; needs a positive integer")
        return value

    def _found(self, key: str) -> str:
        return f"is {self.values[key]!r}" if key in self.values else "is missing"

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{self.path}: {key} {self._found(key)}; needs a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: {key} is {value!r}; needs true or false")
        return value

    def table(self, key: str) -> "_Reader | None":
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ValueError(f"{self.path}: {key} is {value!r}; needs an object")
        return _Reader(self.path, value)

    def refuse(self, key: str, *allowed: object) -> None:
        """Raise unless `key` is absent, null or one of `allowed`."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(repr, allowed)) or "it to be absent"
            raise ValueError(f"{self.path}: {key} = {value!r} is not supported by the trainer; needs {wanted}")


def read_model_spec(directory: Path) -> ModelSpec:
    """Architecture described by `directory/config.json`.

    Raises:
        ValueError: the file is missing, unreadable, of an unsupported family, or uses an unsupported feature.
    """
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{directory} holds no config.json; needs a Hugging Face model directory") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); fetch it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a JSON object")
    return _spec(_Reader(path, values))


def _spec(config: _Reader) -> ModelSpec:
    family = _family(config)
    _refuse_unsupported(config, family)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{config.path}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    theta, scaling = _rope(config)
    experts = _experts(config) if family == "qwen3_moe" else None
    return ModelSpec(
        family=family,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.integer("head_dim", hidden_size // num_heads),
        ffn_size=config.integer("intermediate_size") if experts is None else experts.ffn_size,
        vocab_size=config.integer("vocab_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        max_positions=config.integer("max_position_embeddings"),
        experts=experts,
    )


def _experts(config: _Reader) -> Experts:
    config.refuse("decoder_sparse_step", 1)
    config.refuse("mlp_only_layers", [])
    # transformers >= 5 writes the second name
    key = "num_experts" if "num_experts" in config.values else "num_local_experts"
    count, per_token = config.integer(key), config.integer("num_experts_per_tok")
    if per_token > count:
        raise ValueError(f"{config.path}: num_experts_per_tok {per_token} is more than {key} {count}")
    return Experts(
        count=count,
        per_token=per_token,
        ffn_size=config.integer("moe_intermediate_size"),
        normalised=config.flag("norm_topk_prob"),
    )


def _family(config: _Reader) -> Family:
    name = config.values.get("model_type")
    for family in get_args(Family):
        if name == family:
            known: Family = family
            return known
    known_names = ", ".join(get_args(Family))
    raise ValueError(f"{config.path}: model_type {name!r} is not supported by the trainer; needs one of {known_names}")


def _refuse_unsupported(config: _Reader, family: Family) -> None:
    config.refuse("hidden_act", "silu")
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    config.refuse("use_sliding_window", False)
    config.refuse("partial_rotary_factor", 1)
    config.refuse("quantization_config")
    for key, harmless in (_ONLY_OF_VLLM | _ONLY_OF_VLLM_IN.get(family, {})).items():
        config.refuse(key, *harmless)
    kinds = config.values.get("layer_types")
    if isinstance(kinds, list) and (other := [kind for kind in kinds if kind != "full_attention"]):
        raise ValueError(f"{config.path}: layer_types holds {other[0]!r}; the trainer has full_attention only")


def _rope(config: _Reader) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from `rope_parameters` (transformers >= 5) or from the older pair of keys.

    If a file has both tables, transformers and vLLM read `rope_scaling` alone.
    """
    tables = {
        key: table for key in ("rope_parameters", "rope_scaling") if (table := config.table(key)) and table.values
    }
    if not tables:
        return config.number("rope_theta", 10000.0), None
    read = [_read_rope(config, key, table) for key, table in tables.items()]
    if read[0] != read[-1]:
        both = " and ".join(f"{key} = {table.values!r}" for key, table in tables.items())
        raise ValueError(f"{config.path}: {both} are different rotary embeddings; remove the one that is not meant")
    return read[0]


def _read_rope(config: _Reader, key: str, table: _Reader) -> tuple[float, RopeScaling | None]:
    table.refuse("partial_rotary_factor", 1)
    theta = table.number("rope_theta", config.number("rope_theta", 10000.0))
    kind = table.values.get("rope_type", table.values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"{config.path}: rope_type {kind!r} in {key} is not supported by the trainer; needs 'default' or 'llama3'"
        )
    return theta, RopeScaling(
        factor=table.number("factor"),
        low_freq_factor=table.number("low_freq_factor"),
        high_freq_factor=table.number("high_freq_factor"),
        original_max_positions=table.integer("original_max_position_embeddings"),
    )


def check_parallel(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Refuse a partition that does not divide the model.

    Raises:
        ValueError: naming the parallel size, the model's figure and valid sizes.
    """
    cut = {"attention heads": spec.num_heads, "ffn rows": spec.ffn_size, "key/value heads": spec.num_kv_heads}
    for what, count in cut.items():
        fits = _fits_key_heads(spec, parallel.tensor) if what == "key/value heads" else count % parallel.tensor == 0
        if not fits:
            raise ValueError(
                f"trainer.parallel.tensor = {parallel.tensor} does not divide the model's {count} {what}; "
                f"sizes that divide all: {', '.join(map(str, _tensor_sizes(spec)))}"
            )
    _check_experts(spec, parallel)
    if parallel.pipeline > spec.num_layers:
        raise ValueError(
            f"trainer.parallel.pipeline = {parallel.pipeline} is more than the model's {spec.num_layers} layers; "
            f"needs at most {spec.num_layers}"
        )


def _check_experts(spec: ModelSpec, parallel: ParallelConfig) -> None:
    if parallel.expert == 1:
        return
    count = 0 if spec.experts is None else spec.experts.count
    if not count or count % parallel.expert:
        what = f"the model's {count} experts" if count else "a model without experts"
        raise ValueError(f"trainer.parallel.expert = {parallel.expert} does not divide {what}; 1 always does")
    if parallel.data % parallel.expert:
        raise ValueError(
            f"trainer.parallel.expert = {parallel.expert} does not divide trainer.parallel.data = {parallel.data}: "
            "experts are spread over data-parallel ranks; change one of them"
        )


def _fits_key_heads(spec: ModelSpec, tensor: int) -> bool:
    """Whether the size divides the key/value heads, or is a multiple of them.

    With a multiple, ranks that share a head gather query, key and value of its group, and each attends with its query
    heads. The rows of the fused matrix must divide.
    """
    if spec.num_kv_heads % tensor == 0:
        return True
    rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return tensor % spec.num_kv_heads == 0 and rows % tensor == 0


def _tensor_sizes(spec: ModelSpec) -> list[int]:
    return [
        n
        for n in range(1, spec.num_heads + 1)
        if not (spec.num_heads % n or spec.ffn_size % n) and _fits_key_heads(spec, n)
    ]


def stage_layers(num_layers: int, pipeline: int) -> tuple[range, ...]:
    """Layers of each pipeline stage, in order. The first stages take the remainder.

    The last stage never takes more, because it computes the output layer.
    """
    base, longer = divmod(num_layers, pipeline)
    starts = [stage * base + min(stage, longer) for stage in range(pipeline + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))

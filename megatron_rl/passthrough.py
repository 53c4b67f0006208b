"""Fields of Megatron's `TransformerConfig` that `trainer.megatron` may set.

Each field changes how a forward is computed: precision, kernels, memory, communication. None changes what is learned.
Other fields follow from other keys, or add a loss or noise. Megatron scales losses of its own, such as the router's
z-loss, for a loss that it averages. Ours is already divided (`megatron_rl.trainer.optimizer`), so such a loss would
count once for every token.

Pure: names and bounds only. `tests/megatron_rl/model/test_passthrough.py` trains with each field and compares
gradients.
"""

import difflib
from collections.abc import Mapping

FIELDS: Mapping[str, type[bool] | type[int] | type[str]] = {
    # precision
    "attention_softmax_in_fp32": bool,
    "disable_bf16_reduced_precision_matmul": bool,
    "moe_router_dtype": str,
    # kernels
    "apply_rope_fusion": bool,
    "bias_activation_fusion": bool,
    "bias_dropout_fusion": bool,
    "deterministic_mode": bool,
    "masked_softmax_fusion": bool,
    "memory_efficient_layer_norm": bool,
    "moe_permute_fusion": bool,
    "moe_router_fusion": bool,
    "persist_layer_norm": bool,
    # memory
    "deallocate_pipeline_outputs": bool,
    "recompute_method": str,
    "recompute_num_layers": int,
    # communication
    "batch_p2p_comm": bool,
    "batch_p2p_sync": bool,
}
"""Name and type of each field."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "moe_router_dtype": ("fp32", "fp64"),
    "recompute_method": ("uniform", "block"),
}
"""Values of the fields that are text. Megatron takes any other type of a router as that of the router's input."""

OF_FULL_RECOMPUTATION = ("recompute_method", "recompute_num_layers")
"""Fields that Megatron reads only if whole layers are recomputed."""

OTHER_KEYS = {
    "distribute_saved_activations": "sequence parallelism, on beside tensor parallelism, distributes them already",
    "fp32_residual_connection": "Megatron applies it to the embedding alone, whose FP32 output BF16 layers cannot take",
    "fp8": "`trainer.fp8` sets it",
    "fp8_param": "`trainer.fp8` sets it, because weights in FP8 need their own loading, publishing and saving",
    "fp8_recipe": "`trainer.fp8` sets it",
    "recompute_granularity": "`trainer.recompute` sets it",
    "moe_aux_loss_coeff": "a loss of the router would be added to the policy's",
    "moe_input_jitter_eps": "its noise would make old and new log-probabilities those of different models",
    "moe_z_loss_coeff": "Megatron would count it once for every token",
    "mtp_num_layers": "its loss would be added to the policy's",
}
"""Why some fields that users ask for are refused."""


def passthrough_problem(fields: Mapping[str, object]) -> str:
    """Why the fields of `trainer.megatron` are refused, with the fix; empty if they are not."""
    for name, value in fields.items():
        kind = FIELDS.get(name)
        if name in OTHER_KEYS:
            return f"`{name}` is refused: {OTHER_KEYS[name]}; remove it"
        if kind is None:
            nearest = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean `{nearest[0]}`? " if nearest else ""
            return f"`{name}` is not a field that may be set here; {hint}These may: {', '.join(sorted(FIELDS))}"
        if type(value) is not kind:
            return f"`{name}` = {value} must be of type {kind.__name__}"
        if name in CHOICES and value not in CHOICES[name]:
            return (
                f"`{name}` = {value}: Megatron knows {' and '.join(CHOICES[name])}; set it to one of them, or remove it"
            )
    if int(str(fields.get("recompute_num_layers", 1))) < 1:
        return f"`recompute_num_layers` = {fields['recompute_num_layers']} must be at least 1; raise it or remove it"
    return ""


def recompute_problem(recompute: str, fields: Mapping[str, object]) -> str:
    """Why fields of `trainer.megatron` do not go with `trainer.recompute`, with the fix; empty if they do."""
    unread = [f"{name} = {fields[name]}" for name in OF_FULL_RECOMPUTATION if name in fields]
    if recompute == "full" or not unread:
        return ""
    return (
        f"`trainer.megatron` sets {' and '.join(unread)}, which `trainer.recompute` = {recompute} does not read; set "
        "recompute to full, or remove what it sets"
    )

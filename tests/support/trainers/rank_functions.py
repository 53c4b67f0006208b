"""Functions that the parity tests run on trainer ranks (picklable: plain functions of this module)."""

import torch


def build_loaded(
    position, parallel, directory, *, sequence_parallel=None, dtype="fp32", recompute="none", chunk_tokens=7
):
    from megatron_rl.model.build import ModelOptions, build, layer_names
    from megatron_rl.model.spec import read_model_spec
    from megatron_rl.weights.hf_load import load
    from megatron_rl.weights.shards import rank_shards

    spec = read_model_spec(directory)
    (model,) = build(
        spec,
        parallel,
        position,
        ModelOptions(dtype=dtype, recompute=recompute, chunk_tokens=chunk_tokens, sequence_parallel=sequence_parallel),
    )
    shards = rank_shards(
        spec,
        parallel,
        tensor_rank=position.tensor,
        pipeline_rank=position.pipeline,
        data_rank=position.data,
        uses_te_layer_names=layer_names() == "te",
    )
    load(model, shards, spec, directory)
    return model


def run_schedule(model, batches, forward_step, *, forward_only):
    """One pass of Megatron's schedule over packed batches; returns the reports of the last stage's loss function."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def full_logits(position, parallel, directory, batches, sequence_parallel):
    """Logits [T, VOCAB] of every batch, from the last stage's first rank (None elsewhere)."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from torch import distributed as dist

    model = build_loaded(position, parallel, directory, sequence_parallel=sequence_parallel).eval()
    group = model.pg_collection.tp

    def finish(hidden):
        rows = gather_from_sequence_parallel_region(hidden, group=group) if sequence_parallel else hidden
        part = (rows[:, 0] @ model.output_weight().t()).contiguous()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        logits = torch.cat(parts, dim=1)[:, : model.spec.vocab_size]
        return hidden.sum(), torch.tensor(1), logits.detach().numpy()

    with torch.no_grad():
        found = run_schedule(model, batches, lambda data, chunk: (chunk(next(data)), finish), forward_only=True)
    return found if position.tensor == 0 and found else None


def gradients(position, parallel, directory, batches, coefficients, sequence_parallel, recompute):
    """Scores of every batch, and gradients [(shard, array)] of this rank after one pass of DDP and schedule.

    The loss is the sum of `coefficients` [2, R] times (logprobs, entropy); each data-parallel rank has its share
    of the batches.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from megatron_rl.model.build import layer_names
    from megatron_rl.weights.shards import rank_shards

    module = build_loaded(
        position, parallel, directory, sequence_parallel=sequence_parallel, recompute=recompute
    ).train()
    model = DistributedDataParallel(
        config=module.config, ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True), module=module
    )
    model.zero_grad_buffer()

    def step(data, chunk):
        batch, weights = next(data)

        def loss(scores):
            value = (weights[0] * scores.logprobs + weights[1] * scores.entropy).sum()
            return value, torch.tensor(1), (scores.logprobs.detach().numpy(), scores.entropy.detach().numpy())

        return chunk(batch, temperature=0.7), loss

    share = list(zip(batches, coefficients, strict=True))[position.data :: parallel.data]
    found = run_schedule(model, share, step, forward_only=False)
    finalize_model_grads([model])
    parameters = dict(module.named_parameters())
    shards = rank_shards(
        module.spec,
        parallel,
        tensor_rank=position.tensor,
        pipeline_rank=position.pipeline,
        data_rank=position.data,
        uses_te_layer_names=layer_names() == "te",
    )
    return found, [(p, parameters[p.megatron_name].main_grad[p.megatron_slices].numpy().copy()) for p in shards]


def value_gradients(position, parallel, directory, batches, coefficients, head, sequence_parallel):
    """Values of every batch, and gradients [(name, box, array)] of this rank after one pass of DDP and schedule.

    The critic has the weights of `directory` and the head `head` (None: as it is built); the loss is the sum of
    `coefficients` [R] times values.
    """
    from megatron_rl.model.build import ModelOptions, layer_names
    from megatron_rl.model.spec import read_model_spec
    from megatron_rl.model.value_model import build_value
    from megatron_rl.trainer.optimizer import wrap
    from megatron_rl.trainer.pipeline import run_schedule as run
    from megatron_rl.weights.hf_load import load
    from megatron_rl.weights.shards import rank_shards, trunk_shards

    spec = read_model_spec(directory)
    (model,) = build_value(spec, parallel, position, ModelOptions(dtype="fp32", sequence_parallel=sequence_parallel))
    coordinates = {"tensor_rank": position.tensor, "pipeline_rank": position.pipeline, "data_rank": position.data}
    uses_te = layer_names() == "te"
    shards = trunk_shards(rank_shards(spec, parallel, **coordinates, uses_te_layer_names=uses_te))
    load(model, shards, spec, directory)
    if head is not None and model.post_process:
        model.output_layer.weight.data.copy_(head[None])
    chunks = wrap([model], distributed_optimizer=False)
    chunks[0].zero_grad_buffer()
    share = list(zip(batches, coefficients, strict=True))[position.data :: parallel.data]

    def loss(number, values):
        return (share[number][1] * values).sum(), values.detach().numpy()

    found = run(chunks, [batch for batch, _ in share], loss, temperature=1.0, backward=True)
    parameters = dict(model.named_parameters())
    placed = [(s.hf_name, s.hf_slices, parameters[s.megatron_name].main_grad[s.megatron_slices]) for s in shards]
    if model.post_process:
        placed.append(("head", ..., model.output_layer.weight.main_grad[0]))
    return found, [(name, box, gradient.numpy().copy()) for name, box, gradient in placed]

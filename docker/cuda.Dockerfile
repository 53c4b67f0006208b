# CUDA image: `docker build -f docker/cuda.Dockerfile -t megatron-rl:cuda .`, then
# `docker run --rm --gpus all --shm-size=16g megatron-rl:cuda make test-gpu PYTHON=python`. It has not been built by the
# project's CI. CUDA's libraries and headers come from the packages, so the base image has none. NCCL needs the libraries of
# InfiniBand, and rewards that run programs need bubblewrap.
FROM ubuntu:24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc g++ git ibverbs-providers libibverbs1 make \
        python3 python3-dev python3-venv rdma-core \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /megatron-rl
COPY . .
RUN make setup-cuda CUDA_PYTHON=python3 PIP_ARGS=--no-cache-dir
ENV PATH=/megatron-rl/.venv-cuda/bin:$PATH
CMD ["make", "help"]

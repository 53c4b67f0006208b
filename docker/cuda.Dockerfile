# CUDA image: `docker build -f docker/cuda.Dockerfile -t megatron-rl:cuda .`, then
# `docker run --rm --gpus all --shm-size=16g megatron-rl:cuda make test-gpu PYTHON=python3`. It has not been built by the
# project's CI. The devel image has nvcc and its headers, with which Transformer Engine compiles its torch extension.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ git make ninja-build python3 python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*

# a virtual environment, since Ubuntu's own Python refuses to install packages
RUN python3 -m venv /opt/megatron-rl
ENV PATH=/opt/megatron-rl/bin:$PATH

WORKDIR /megatron-rl
COPY requirements requirements
RUN pip install --no-cache-dir -r requirements/cuda.txt
COPY . .
RUN pip install --no-cache-dir --no-deps -e .
CMD ["make", "help"]

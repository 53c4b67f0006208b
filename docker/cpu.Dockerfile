# CPU image: `docker build -f docker/cpu.Dockerfile -t megatron-rl:cpu .`, then
# `docker run --rm --shm-size=2g megatron-rl:cpu make quickstart`. It has not been built by the project's CI.
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ git libnuma1 make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /megatron-rl
COPY requirements requirements
COPY setup.py pyproject.toml Makefile README.md ./
COPY history history
COPY rollout rollout
COPY megatron_rl megatron_rl
COPY launcher launcher
RUN make setup PYTHON=python3.11

COPY . .
CMD ["make", "help"]

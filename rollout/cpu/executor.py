"""How an engine with several ranks runs them on CPUs: as vLLM does, but who waits for another process sleeps."""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rollout.cpu import quirks


class CpuExecutor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM imports it by name (`EXECUTOR`) in the process that schedules, which runs none of our code otherwise."""

    def _init_executor(self) -> None:
        quirks.who_waits_for_a_rank_keeps_a_core_busy()
        super()._init_executor()

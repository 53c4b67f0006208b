"""The AsyncLLM of one engine after its start, and calls to its ranks."""

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from rollout.worker import vllm_quirks


class LlmHandle:
    """One engine's vLLM."""

    def __init__(self, name: str) -> None:
        """`name` is the engine's name in errors."""
        self._name = name
        self._started: AsyncLLM | None = None

    @property
    def llm(self) -> AsyncLLM:
        """The started AsyncLLM.

        Raises:
            RuntimeError: the engine was not started.
        """
        if self._started is None:
            raise RuntimeError(f"{self._name} was not started")
        return self._started

    async def start(self, arguments: AsyncEngineArgs) -> None:
        """Start vLLM; returns when it answers."""
        self._started = AsyncLLM.from_engine_args(arguments)
        vllm_quirks.calls_wait_forever_for_a_dead_engine(self._started.engine_core)
        await self.llm.get_supported_tasks()

    def shutdown(self) -> None:
        """Stop vLLM and its processes."""
        if self._started is not None:
            self._started.shutdown()
            self._started = None

    async def ranks(self, method: str, *args: object) -> list[object]:
        """Call a method of every rank's worker; returns their answers.

        Raises:
            RuntimeError: a rank raised, or the engine died; the message names the engine.
        """
        try:
            answers: list[tuple[object, str]] = await self.llm.collective_rpc("answer", args=(method, *args))
        except Exception as error:  # the border to vLLM's processes: a failure there arrives as a plain Exception
            raise RuntimeError(f"{self._name}: {error or type(error).__name__}") from error
        if faults := [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(answers) if fault]:
            raise RuntimeError(f"{self._name} could not {method.replace('_', ' ')}: {'; '.join(faults)}")
        return [answer for answer, _ in answers]

"""Messages between a scorer and its workers."""

import asyncio
import math
import pickle

import pytest

from rollout.rewards.call import RewardOutcome, RewardRequest
from rollout.rewards.frames import Answer, Begun, Ended, Numbered, Ready, frame, read_answer, read_request

REQUEST = RewardRequest(
    function="a.b", data_source="math", solution_str="\ud800 text", ground_truth="2", extra_info_json="{}"
)


def fed(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def read(data: bytes) -> Answer:
    async def answer() -> Answer:
        return await read_answer(fed(data))

    return asyncio.run(answer())


@pytest.mark.parametrize(
    "answer",
    [
        Ready(pid=7),
        Begun(number=3),
        Ended(number=3, outcome=RewardOutcome(reward=-0.1, details=(("acc", 0.5), ("x", 1e300))), num_strays=2),
        Ended(number=4, outcome=RewardOutcome(reward=math.inf, error="late", is_late=True, misuse="é"), num_strays=0),
    ],
)
def test_an_answer_arrives_as_it_was_sent(answer: Answer) -> None:
    assert read(frame(answer)) == answer


def test_a_request_arrives_as_it_was_sent() -> None:
    async def request() -> Numbered:
        return await read_request(fed(frame(Numbered(number=1, request=REQUEST))))

    assert asyncio.run(request()) == Numbered(number=1, request=REQUEST)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('a planted pickle was loaded')",)


@pytest.mark.parametrize(
    "payload", [pickle.dumps(Evil()), b"[]", b'["Ready", {}]', b'["Other", {"pid": 1}]', b'["Ended", {"number": 1}]']
)
def test_what_foreign_code_writes_into_the_channel_ends_the_connection(payload: bytes) -> None:
    with pytest.raises(ConnectionError):
        read(len(payload).to_bytes(8, "big") + payload)

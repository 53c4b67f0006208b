"""Stop tokens: engines stop at the tokenizer's end of sequence, and at the end of an assistant's turn in the template.

An engine that misses the stop token samples every response to its limit: no error, and a ruined run.
"""

from collections.abc import Sequence

from rollout.data.chat_template import ChatMessage
from rollout.data.tokenizer import Tokenizer, TokenizerFacts

ANSWER = "an answer"


def stop_token_line(
    tokenizer: Tokenizer, facts: TokenizerFacts, engine_ids: Sequence[int], vocab_size: int
) -> tuple[str, list[str]]:
    """Value and problems.

    Args:
        tokenizer: the model's.
        facts: of `tokenizer`.
        engine_ids: token ids at which engines stop, those of `sampling.stop_token_ids` included.
        vocab_size: rows of the model's embedding.
    """
    problems = []
    if facts.eos_token_id not in engine_ids:
        problems.append(
            f"the tokenizer's end of sequence is {facts.eos_token_id}, engines stop at {list(engine_ids)}; set "
            "eos_token_id in generation_config.json, or `sampling.stop_token_ids`"
        )
    beyond = [token for token in engine_ids if token >= vocab_size]
    if beyond:
        problems.append(
            f"stop token {beyond[0]} is beyond the model's {vocab_size} tokens; mend generation_config.json"
        )
    turn_end = _turn_end(tokenizer)
    if turn_end is not None and turn_end not in engine_ids:
        problems.append(
            f"the chat template ends an answer with token {turn_end}, engines stop at {list(engine_ids)}; add it to "
            "`sampling.stop_token_ids`"
        )
    return f"engines stop at {list(engine_ids)}", problems


def _turn_end(tokenizer: Tokenizer) -> int | None:
    """The special token that follows an answer in the chat template; None where ordinary text or nothing follows."""
    if not tokenizer.has_chat_template:
        return None
    turns = [ChatMessage(role="user", content="a question"), ChatMessage(role="assistant", content=ANSWER)]
    _, answer, behind = tokenizer.render(turns).rpartition(ANSWER)
    if not answer:  # the template drops it, which is a red line of the tokenizer
        return None
    (ids,) = tokenizer.encode([behind], add_special_tokens=False)
    return int(ids[0]) if len(ids) and not tokenizer.decode(ids[:1]) else None

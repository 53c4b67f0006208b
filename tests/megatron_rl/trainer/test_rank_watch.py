"""Who of a trainer's ranks hangs, from what a reader on their node sees."""

from megatron_rl.trainer.rank_watch import MOVED_BYTES, _Rank, least_far, marks_text
from rollout.progress import Seen


def seen(num_marks=10, *, num_calls=3, in_call=4, text="train: micro batch 4 of 8", state="running", **more):
    return Seen(
        num_marks=num_marks,
        num_calls=num_calls,
        in_call=in_call,
        text=text,
        kind=more.get("kind", "work"),
        num_bytes=more.get("num_bytes", 0),
        state=state,
        waits_for_disk=more.get("waits_for_disk", False),
    )


def silence_after(first, second):
    rank = _Rank(first)
    rank.follow(second, 5.0)
    return rank.silent_s


def test_only_a_new_mark_ends_the_silence_of_a_rank_that_works():
    assert silence_after(seen(10), seen(10)) == 5.0
    assert silence_after(seen(10), seen(11)) == 0.0


def test_a_rank_that_hands_over_a_bucket_is_not_silent():
    assert silence_after(seen(kind="handover"), seen(kind="handover")) == 0.0
    assert silence_after(seen(kind="handover"), seen(kind="handover", state="stopped")) == 5.0


def test_bytes_of_files_end_the_silence_even_if_they_come_slowly():
    rank = _Rank(seen(kind="files"))
    silences = []
    for look in range(1, 5):
        rank.follow(seen(kind="files", num_bytes=look * MOVED_BYTES // 2), 5.0)
        silences.append(rank.silent_s)
    assert silences == [5.0, 0.0, 5.0, 0.0]
    assert silence_after(seen(kind="files"), seen(kind="files", waits_for_disk=True)) == 0.0


def test_the_rank_with_the_fewest_marks_in_the_newest_call_is_waited_for():
    assert least_far({0: seen(in_call=5), 1: seen(in_call=4), 2: seen(in_call=5)}) == (1,)
    assert least_far({0: seen(in_call=5), 1: seen(num_calls=2, in_call=90), 2: seen(in_call=5)}) == (1,)
    assert least_far({0: seen(), 1: seen()}) == (0, 1)


def test_a_frozen_rank_is_waited_for_however_far_it_is():
    assert least_far({0: seen(in_call=1), 1: seen(in_call=7, state="stopped")}) == (1,)


def test_the_text_names_suspects_first_and_each_mark_once():
    ranks = {rank: seen(in_call=5, text="train: gradients") for rank in range(512)}
    ranks |= {3: seen(text="train: micro batch 4 of 8"), 7: seen(num_calls=2, text="probe")}
    nodes = {rank: f"node-{rank // 8}" for rank in range(512)}
    assert marks_text(ranks, (7,), nodes) == (
        "rank 7 on node-0 at `the call before, probe` (running); "
        "rank 0-2, 4-6, 8-511 on node-0 and others at `train: gradients` (running); "
        "rank 3 on node-0 at `train: micro batch 4 of 8` (running)"
    )


def test_a_text_of_many_marks_is_short():
    ranks = {rank: seen(text=f"train: micro batch {rank:02d}") for rank in range(20)}
    text = marks_text(ranks, (), dict.fromkeys(ranks, "node"))
    assert text.count("micro batch") == 6 and text.endswith("; 14 more marks")

"""View of whole trainings: seconds to a fixed accuracy, against stacks that a user knows."""

from benchmarks.end_to_end.arms import ACCURACY, BASE, OURS, PLAIN_LOOP, TRL
from benchmarks.harness.record_answers import Answer, median
from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import View, percent


def _against(other: str) -> dict[str, tuple[str, ...]]:
    return {"what": ("difference",), "arm": (OURS,), "against": (other,)}


_SPEED = "speed"
END_TO_END = View(
    question=f"How much sooner does a model reach a held-out accuracy of {ACCURACY:.0%}, counted from launch?",
    answer=Answer(
        text=(
            "Over {seeds} seeds {base} times as soon as synchronous BF16 ({low} to {high}), {plain} times as soon as a "
            "plain vLLM loop, {trl} times as soon as TRL without vLLM."
        ),
        figures={
            "seeds": median("seeds", _against(BASE)),
            "base": median(_SPEED, _against(BASE)),
            "low": median("speed_low", _against(BASE)),
            "high": median("speed_high", _against(BASE)),
            "plain": median(_SPEED, _against(PLAIN_LOOP)),
            "trl": median(_SPEED, _against(TRL)),
        },
    ),
    tables=(
        Table(
            title="Differences by arm and reference; geometric means of speeds and 95 % intervals over the seeds",
            lines={"arm": "arm", "against": "against"},
            where={"what": ("difference",)},
            columns=(
                Column(field="seeds", title="seeds"),
                Column(field="speed", title="speed to the accuracy, x"),
                Column(field="speed_low", title="speed, lower end"),
                Column(field="speed_high", title="speed, upper end"),
                Column(field="step_speed", title="speed of a step, x"),
                Column(field="step_speed_low", title="step, lower end"),
                Column(field="step_speed_high", title="step, upper end"),
                Column(field="accuracy_points", title="accuracy at the end, points"),
                Column(field="accuracy_points_low", title="accuracy, lower end"),
                Column(field="accuracy_points_high", title="accuracy, upper end"),
                Column(field="reached", title="seeds that reached the accuracy"),
            ),
        ),
        Table(
            title="Runs by arm, medians over the seeds",
            lines={"arm": "arm"},
            where={"what": ("run",)},
            columns=(
                Column(field="seconds_to_accuracy", title="to the accuracy, s"),
                Column(field="seconds", title="whole run, s"),
                Column(field="start_s", title="start, s"),
                Column(field="steps_s", title="steps, s"),
                Column(field="step_s", title="step, s"),
                Column(field="rollout_s", title="rollout, s"),
                Column(field="train_s", title="training, s"),
                Column(field="publish_s", title="publish, s"),
                percent("rollout_share", "rollout"),
                Column(field="tokens", title="response tokens"),
                Column(field="tokens_per_forward_first", title="tokens per forward, first epoch"),
                Column(field="tokens_per_forward_later", title="later epochs"),
                Column(field="mean_staleness", title="mean staleness"),
                percent("accuracy_first", "accuracy before"),
                percent("accuracy_last", "accuracy at the end"),
            ),
        ),
        Table(
            title="Held-out accuracy by finished steps, %; medians over the seeds",
            lines={"arm": "arm"},
            where={"what": ("evaluation",)},
            across="step",
            columns=(percent("accuracy", "accuracy"),),
        ),
        Table(
            title="Runs that were begun and do not count",
            lines={"arm": "arm", "why": "why"},
            where={"what": ("discarded",)},
            columns=(Column(field="seed", title="runs", reduce="count"),),
            may_be_empty=True,
        ),
    ),
    notes=(
        "An accuracy has the seconds from launch to the end of its step. No run evaluates: a stock vLLM scores the "
        "saved weights of all stacks afterwards, with the same random numbers.",
        "TRL samples with `generate` of Transformers, because its vLLM mode does not run on a CPU.",
        "Answers to a prompt differ in about a twelfth of their tokens, so a history helps drafts much.",
        "Sizes of model and answers, and the accuracy to reach, were chosen on development seeds. They give the base "
        "70 to 90 % of its steps in rollout.",
        "The accuracy at the end is the mean of the last two. Held-out responses are sampled.",
        "Trainer and engine have a core each. Peers use both cores, in turns, in environments of their own. The arm "
        "`both cores` is the base that does so.",
        "A whole record has four seeds of all arms, and two more of those that goals compare. Arms without lines were "
        "not measured; their goals show 0 x or -100 points and count as missed.",
        "Where a run did not reach the accuracy, the comparison has no speed, and its goal counts as missed.",
        "`other history` gives each prompt the history of another one and `no history` gives it none; both draft "
        "without the ring, which on data this small would hold all earlier responses.",
    ),
)

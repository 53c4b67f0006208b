"""How much sooner a model is trained: seconds from launch to a fixed held-out accuracy, against known stacks.

`python -m benchmarks.end_to_end --json OUT [--peers DIR] [--seeds N ..] [--only ARM ..] [--resume] [--quick]`.

The sizes imitate RL on long answers, scaled to two cores: a model of half a million parameters with a context of 2,304
tokens, answers with a mean near 250 tokens and a tail to 2,000 (`benchmarks.end_to_end.chains`), 48 prompts, 4 x 8
responses a step, five epochs. Decoding is bound by the fixed cost of a forward, as on GPUs. The benchmark ends with an
error unless the base spends 70 to 90 % of its steps in rollout, on the mean over its seeds.

Arms (`benchmarks.end_to_end.arms`) run from one warm start with the same prompts, batch and learning rate. They save
their weights every ten steps, and one stock vLLM scores the weights of all of them afterwards, with the same random
numbers. All arms run with four seeds, those that goals compare with six. Their order is reversed with odd seeds, so
slow drifts of the machine affect all alike. Before the first run every stack is launched once, untimed, so that no arm
pays for reading files or compiling. Trainer and engine have a core each; peers have both cores, in environments made by
`python -m benchmarks.end_to_end.peers --setup DIR`. An arm whose INT8 kernel is not exact on this CPU, and a peer
without an environment, is left out and listed as not measured, as are runs that are still to come. All arms of a seed
run in one boot of one machine with one commit: `--resume` measures any other unfinished seed anew.

Rows: one per run, one per accuracy, one per pair of arms with differences over the seeds, and one per run that was
begun and does not count. `--quick` runs the base and the fastest arm for two steps on short answers; its figures mean
nothing. Beside OUT, `OUT.accuracy.svg` shows accuracy over seconds.
"""

import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.end_to_end import inputs, picture
from benchmarks.end_to_end.arms import ARMS, COMPARED, OURS, PLAIN_LOOP, QUICK_ARMS, TRL
from benchmarks.end_to_end.judged import check_regime, completed, differences, goals
from benchmarks.end_to_end.peers.setup import python_of
from benchmarks.end_to_end.resumed import absent, boot, discarded, kept, machine_name
from benchmarks.end_to_end.run_arm import FULL, QUICK, UNTIMED, Place, launch, run
from benchmarks.harness.record import Goal, Row, arguments, measured_code, rows_before, write

NOT_MEASURED = ("any GPU", "a model of more than half a million parameters", "several engines, or nodes")
_INT8_CHECK = "rollout.worker.exact_int8"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and write the record. SystemExit if a run fails or the regime is another."""
    parser = arguments("Seconds to a fixed held-out accuracy: this project by its features, and peers.")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of those of the record; for development")
    parser.add_argument("--only", nargs="+", choices=list(ARMS), default=[], metavar="ARM", help="run these arms only")
    parser.add_argument("--peers", type=Path, default=Path("runs/bench/peers"), help="the peers' environments")
    parser.add_argument("--work", type=Path, default=Path("runs/bench/end_to_end"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that OUT has")
    options = parser.parse_args(argv)
    size = QUICK if options.quick else FULL
    seeds = options.seeds or (inputs.QUICK_SEEDS if options.quick else inputs.SEEDS + inputs.MORE_SEEDS)
    left_out = {} if options.quick else unfit(options.peers)
    wanted = options.only or [*(QUICK_ARMS if options.quick else ARMS)]
    arms = [arm for arm in wanted if arm not in left_out]

    def arms_of(seed: int) -> list[str]:
        return [arm for arm in arms if arm in COMPARED or seed not in inputs.MORE_SEEDS or arm in options.only]

    warm = inputs.warm_start(options.work, quick=options.quick)
    # as `make setup` does: a clone in which nothing has drafted yet would compile in the first arm that drafts
    subprocess.run([sys.executable, "-m", "history.drafting.compile"], check=True)
    place = Place(warm=warm, work=options.work, peers=options.peers)
    before = [row for row in rows_before(options.json, resume=options.resume) if row["what"] != "difference"]
    here: Row = {"machine": machine_name(), "boot": boot()}
    rows, ended = kept(before, arms_of, {**here, "commit": measured_code().commit})
    done = {(row["seed"], row["arm"]) for row in rows if row["what"] == "run"}
    missing = [
        (seed, arm)
        for seed in seeds
        for arm in arms_of(seed)[:: -1 if seed % 2 else 1]
        if seed not in ended and (seed, arm) not in done
    ]
    for arm in (OURS, PLAIN_LOOP, TRL):
        if not options.quick and any(ARMS[arm].peer == ARMS[other].peer for _, other in missing):
            launch(f"untimed {arm}", ARMS[arm], inputs.DEVELOPMENT_SEED, place, UNTIMED)

    def save(rows: Sequence[Row], *judged: Row, goals: Sequence[Goal] = ()) -> list[Row]:
        gaps = [] if options.quick else [*left_out.values(), *absent(rows, left_out)]
        write(options.json, rows=[*rows, *judged], goals=goals, not_measured=[*NOT_MEASURED, *gaps])
        return rows_before(options.json, resume=True)  # with the commit of this process

    for seed, arm in missing:
        # a row that a run replaces when it ends: one that is stopped or fails stays in the record
        rows = save([*rows, discarded({"seed": seed, "arm": arm, **here}, "it failed or was stopped")])
        whole, *points = run(arm, ARMS[arm], seed, place, size)
        rows = save([*rows[:-1], {**completed(whole, points), **here}, *points])
        print(f"seed {seed}, {arm}: {whole['step_s']} s a step, {whole['seconds']} s in all", flush=True)
        if not options.quick:
            check_regime(rows, fewest=len(inputs.SEEDS))
    if not options.quick:
        check_regime(rows)
    judged = [] if options.quick else [*differences(rows)]
    save(rows, *judged, goals=[] if options.quick else [*goals(judged)])
    options.json.with_suffix(".accuracy.svg").write_text(picture.accuracy(rows), encoding="utf-8")
    return 0


def unfit(peers: Path) -> dict[str, str]:
    """Arms that cannot be measured on this machine, and why."""
    found = {}
    for name, arm in ARMS.items():
        if arm.peer is not None and not python_of(peers, arm.peer).exists():
            found[name] = f"{name}: {peers} has no environment of it"
        if arm.keys.get("engine.format") == "int8" and not int8_is_exact():
            found[name] = f"{name}: the INT8 kernel of this CPU is not exact"
    return found


@functools.cache
def int8_is_exact() -> bool:
    """Whether vLLM's INT8 kernel multiplies exactly on this CPU."""
    done = subprocess.run([sys.executable, "-m", _INT8_CHECK], capture_output=True, text=True, check=True)
    return "equal exact sums" in done.stdout


if __name__ == "__main__":
    sys.exit(main())

"""Reward functions for the tests of scoring, in a module because workers import them by path."""

import os
import subprocess
import sys
import time
from pathlib import Path


def length(data_source, solution_str, ground_truth, extra_info):
    return {
        "score": len(solution_str),
        "same": solution_str == ground_truth,
        "index": (extra_info or {}).get("index", -1),
    }


def moody(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "die":
        os._exit(3)
    if solution_str == "raise":
        raise KeyError("not\nthere")
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "interrupt":
        raise KeyboardInterrupt
    if solution_str == "environment":
        return float(any(name.startswith("RAY_") for name in os.environ))
    if solution_str == "pid":
        return float(os.getpid())
    if solution_str == "memory":
        return float(len(bytearray(3 << 30)))
    if solution_str.startswith("file "):
        Path(solution_str.removeprefix("file ")).write_bytes(bytes(2 << 20))
    if solution_str.startswith("child "):
        child = subprocess.Popen(["sleep", "3600"])
        Path(solution_str.removeprefix("child ")).write_text(str(child.pid))
        time.sleep(3600)
    return 1.0


def textual(data_source, solution_str, ground_truth, extra_info):
    return "good"


def broken(data_source, solution_str, ground_truth, extra_info):
    return {"right": 1.0}["wrong"]

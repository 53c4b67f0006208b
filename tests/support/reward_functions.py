"""Reward functions for the tests of scoring, in a module because workers import them by path."""

import asyncio
import os
import resource
import subprocess
import sys
import time
import zlib
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
    if solution_str.startswith("environment "):
        return float(solution_str.removeprefix("environment ") in environments())
    if solution_str == "group":
        return float(os.getpgid(0) == os.getsid(0) == os.getpid())
    if solution_str == "cores":
        return float(resource.getrlimit(resource.RLIMIT_CORE)[1])
    if solution_str == "ray":
        return float("ray" in sys.modules or "torch" in sys.modules)
    if solution_str == "burn":
        burn()
    if solution_str == "burn below":
        subprocess.run([sys.executable, "-c", "while True: pass"], check=True)
    if solution_str.startswith("many "):
        children = [subprocess.Popen(["sleep", "3600"]) for _ in range(int(solution_str.removeprefix("many ")))]
        children[0].wait()
    if solution_str.startswith("leave and hang "):
        leave(Path(solution_str.removeprefix("leave and hang ")))
        time.sleep(3600)
    if solution_str.startswith("leave "):
        file = Path(solution_str.removeprefix("leave "))
        leave(file)
        while not file.exists() or not file.read_text():
            time.sleep(0.01)
    if solution_str.startswith("note and wait "):
        note, end = solution_str.removeprefix("note and wait ").split()
        Path(note).write_text(str(os.getpid()))
        wait_for(Path(end))
    if solution_str.startswith("until "):
        wait_for(Path(solution_str.removeprefix("until ")))
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


def environments():
    """Names of the variables of this process, as it sees them and as it was started."""
    started = [pair.partition(b"=")[0].decode() for pair in Path("/proc/self/environ").read_bytes().split(b"\0")]
    return {*os.environ, *started}


def burn():
    while True:
        pass


def leave(file):
    """Start a daemon with a session of its own, whose parent ends at once; it writes its number into a file."""
    daemon = "import os; os.setsid(); os.fork() and os._exit(0); open({!r}, 'w').write(str(os.getpid())); "
    daemon += "import time; time.sleep(3600)"
    subprocess.run([sys.executable, "-c", daemon.format(str(file))], check=True)


def wait_for(file):
    while not file.exists():
        time.sleep(0.01)


async def patient(data_source, solution_str, ground_truth, extra_info):
    """Asynchronous; `meet FOLDER NUMBER NAME` returns when so many calls are there."""
    if solution_str == "hang":
        await asyncio.sleep(3600)
    if solution_str == "block":
        time.sleep(3600)
    if solution_str == "die":
        os._exit(3)
    if solution_str == "exit":
        sys.exit(3)
    if solution_str.startswith("meet "):
        _, folder, number, name = solution_str.split()
        (Path(folder) / name).touch()
        while len(list(Path(folder).iterdir())) < int(number):
            await asyncio.sleep(0.01)
    return {"score": 1.0, "pid": os.getpid()}


def textual(data_source, solution_str, ground_truth, extra_info):
    return "good"


def scarce(data_source, solution_str, ground_truth, extra_info):
    """Only 4 of 10 prompts tell their responses apart."""
    if zlib.crc32(f"{ground_truth}{extra_info}".encode()) % 10 >= 4:
        return 0.0
    return float(len(solution_str) % 2)


def broken(data_source, solution_str, ground_truth, extra_info):
    return {"right": 1.0}["wrong"]

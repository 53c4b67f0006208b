"""A load refuses a damaged checkpoint, or restores what was saved."""

import errno
import io
import pickle
import re
import traceback
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rl.checkpoints.damage import DamagedCheckpointError
from megatron_rl.checkpoints.files import check_files
from megatron_rl.config import ParallelConfig
from tests.megatron_rl.trainer.test_trainer import ALGORITHMS, DP2, batch_for, train_save_train, trainer_spec
from tests.support.trainers.tiny_megatron_models import save_model

ALGORITHM = ALGORITHMS["one update"]
SINGLE = ParallelConfig()
WEIGHT = "decoder.final_layernorm.weight"
LOADED, CHANGED = "loaded what was saved", "loaded something else"


@pytest.fixture
def checkpoint(ranks, tmp_path):
    """Specification of a trainer on one rank, and its checkpoint."""
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_model("qwen3", model)
    spec = trainer_spec(model, SINGLE, ALGORITHM)
    ranks.run(train_save_train, spec, batch_for(SINGLE, ALGORITHM), saved, parallel=SINGLE)
    return spec, saved


def elements(folder):
    """File, byte in the middle of its elements, and name of each tensor of a checkpoint."""
    found = []
    for index, info in pickle.loads((folder / ".metadata").read_bytes()).storage_data.items():
        content = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        entry = ZipFile(io.BytesIO(content)).getinfo("archive/data/0")
        # the name and torch's padding lie before the elements
        lengths = [int.from_bytes(content[entry.header_offset + at :][:2], "little") for at in (26, 28)]
        place = info.offset + entry.header_offset + 30 + sum(lengths) + entry.file_size // 2
        found.append((info.relative_path, place, index.fqn))
    return found


def inverted(content, place, count=1):
    return content[:place] + bytes(each ^ 0xFF for each in content[place : place + count]) + content[place + count :]


def test_a_flip_in_a_tensor_is_refused_and_others_change_nothing(ranks, checkpoint):
    spec, saved = checkpoint
    tensors = elements(saved)[::3]
    assert {name.split(".")[2] for _, _, name in tensors if name.startswith("optimizer")} == {"exp_avg", "exp_avg_sq"}
    spread = [
        (file.name, place, 64)
        for file in sorted(saved.glob("*.distcp"))
        for place in range(0, file.stat().st_size, file.stat().st_size // 8)
    ]
    padding = [(file.name, file.read_bytes().index(b"ZZZZ"), 1) for file in sorted(saved.glob("*.distcp"))]
    flips = [*[(file, place, 1) for file, place, _ in tensors], *spread, *padding]
    (outcomes,) = ranks.run(load_each, spec, saved, flips, parallel=SINGLE)
    for (file, _, name), outcome in zip(tensors, outcomes, strict=False):
        assert f"{file} is damaged at the tensor {name} (the bytes of its entry archive/data/0 are not" in outcome
    assert CHANGED not in outcomes
    assert outcomes[-len(padding) :] == [LOADED] * len(padding)


def load_each(position, parallel, spec, folder, flips):
    """What a load says after each damage: bytes of a file, from a place on."""
    from megatron_rl.trainer.trainer import Trainer

    trainer, outcomes = Trainer(spec, position), []
    trainer.load(str(folder))
    wanted = [tensor.clone() for tensor in state_of(trainer)]
    for name, place, count in flips:
        file = folder / name
        content = file.read_bytes()
        file.write_bytes(inverted(content, place, count))
        for tensor in state_of(trainer):
            tensor.zero_()
        try:
            trainer.load(str(folder))
        except DamagedCheckpointError as error:
            outcomes.append(str(error))
        else:
            is_whole = all(a.equal(b) for a, b in zip(state_of(trainer), wanted, strict=True))
            outcomes.append(LOADED if is_whole else CHANGED)
        file.write_bytes(content)
    return outcomes


def state_of(trainer):
    """Weights, masters and moments."""
    from megatron_rl.checkpoints.boxes import _parts

    states = [part.optimizer.state for part in _parts(trainer._policy.optimizer)]
    masters = [tensor for state in states for tensor in state]
    moments = [state[tensor][name] for state in states for tensor in state for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach() for tensor in (*trainer._policy.chunks[0].module.parameters(), *masters, *moments)]


def test_an_error_of_one_rank_reaches_all(ranks, checkpoint):
    spec, saved = checkpoint
    spec = replace(spec, config=spec.config.model_copy(update={"parallel": DP2}))
    file, place, _ = elements(saved)[0]
    (saved / file).write_bytes(inverted((saved / file).read_bytes(), place))
    for text in ranks.run(error_of_a_load, spec, saved, parallel=DP2):
        assert f"{file} is damaged at the tensor" in text


def error_of_a_load(position, parallel, spec, folder):
    from megatron_rl.trainer.trainer import Trainer

    with pytest.raises(DamagedCheckpointError) as caught:
        Trainer(spec, position).load(str(folder))
    return str(caught.value)


def test_a_damaged_policy_is_not_exported(ranks, checkpoint, tmp_path):
    spec, saved = checkpoint
    file, place = next((file, place) for file, place, name in elements(saved) if name == WEIGHT)
    (saved / file).write_bytes(inverted((saved / file).read_bytes(), place))
    with pytest.raises(RuntimeError, match=rf"{file} is damaged at the tensor {re.escape(WEIGHT)} "):
        ranks.run(build_for_export, replace(spec, exports=str(saved)), parallel=SINGLE)


def build_for_export(position, parallel, spec):
    from megatron_rl.trainer.saves import SavedPolicy

    SavedPolicy(spec, position)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("metadata.json", lambda whole: b"", "JSONDecodeError"),
        ("metadata.json", lambda whole: whole[: len(whole) // 2], "JSONDecodeError"),
        ("metadata.json", lambda whole: b"{}", "TypeError"),
        ("metadata.json", lambda whole: b"\xff" + whole, "UnicodeDecodeError"),
        (".metadata", lambda whole: b"", "EOFError"),
        (".metadata", lambda whole: whole.replace(b"state_dict_m", b"state_dict_n"), "AttributeError"),
        ("common.pt", lambda whole: whole[: len(whole) // 2], "BadZipFile"),
        ("common.pt", lambda whole: whole.replace(b"schedule", b"schedulf"), "the bytes of its entry .*data.pkl"),
        ("common.pt", None, "FileNotFoundError"),
    ],
)
def test_another_damaged_file_is_named(small, name, damage, reason):
    file = small / name
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DamagedCheckpointError, match=rf"{re.escape(name)} is damaged \(.*{reason}.*\)$"):
        check_files(small)


@pytest.fixture
def small(tmp_path):
    """A checkpoint without tensors."""
    save_config(CheckpointingConfig("torch_dist", 1), str(tmp_path))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={})))
    torch.save({"schedule": {"num_steps": 3}}, tmp_path / "common.pt")
    assert check_files(tmp_path)[0] == {"schedule": {"num_steps": 3}}
    return tmp_path


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, "Stale file handle", "file"),
        PermissionError(errno.EACCES, "denied", "file"),
        MemoryError(),
    ],
)
def test_a_file_that_cannot_be_read_now_is_not_damaged(small, monkeypatch, name, error):
    usual = Path.read_bytes

    def read_bytes(path):
        if path.name == name:
            raise error
        return usual(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(type(error)) as caught:
        check_files(small)
    assert caught.value is error


def test_lack_of_memory_for_plain_values_is_not_damage(small, monkeypatch):
    def load_without_memory(*given, **named):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes")

    monkeypatch.setattr(torch, "load", load_without_memory)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        check_files(small)


DAMAGE = DamagedCheckpointError("__0_0.distcp is damaged at the tensor a (the bytes of its entry)")
STALE = OSError(errno.ESTALE, "Stale file handle", "/r/__3_0.distcp")
MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory\nstack")
CORRUPT = RuntimeError("PytorchStreamReader failed reading zip archive: not a ZIP archive")


@pytest.mark.parametrize(
    ("causes", "kind", "text"),
    [
        ([DAMAGE], DamagedCheckpointError, "cannot be read: rank 0: __0_0.distcp is damaged at the tensor a"),
        ([DAMAGE, STALE], OSError, "Stale file handle while rank 1 read the tensors of a checkpoint"),
        ([DAMAGE, MEMORY], RuntimeError, "cannot be read: rank 1: RuntimeError: .* can't allocate memory$"),
        ([MemoryError()], RuntimeError, "rank 0: MemoryError"),
        ([OSError("odd"), DAMAGE], OSError, "odd while rank 0"),
        ([CORRUPT], DamagedCheckpointError, "rank 0: RuntimeError: PytorchStreamReader failed"),
        ([FileNotFoundError(errno.ENOENT, "No such file", "a")], DamagedCheckpointError, "rank 0: FileNotFoundError"),
        ([ValueError("Size mismatch")], ValueError, "rank 0: ValueError: Size mismatch"),
    ],
)
def test_an_error_that_may_pass_decides_over_damage_that_other_ranks_find(monkeypatch, causes, kind, text):
    from megatron_rl.trainer import checkpoint as module

    def load_tensors(*given, **named):
        raise CheckpointException("read", {rank: (each, traceback.StackSummary()) for rank, each in enumerate(causes)})

    monkeypatch.setattr(module.dist_checkpointing, "load", load_tensors)
    with pytest.raises(kind, match=text) as caught:
        module._read({}, Path("/r/trainer"))
    assert isinstance(caught.value, DamagedCheckpointError) == (kind is DamagedCheckpointError)
    if causes[-1] is STALE:
        assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, "/r/__3_0.distcp")

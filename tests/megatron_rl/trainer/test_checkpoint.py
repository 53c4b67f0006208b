"""Checkpoints: sharded over ranks, written from copies while the trainer goes on, free of code."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.run_dir.checkpoints import Checkpoints
from megatron_rl.checkpoints.boxes import boxes
from megatron_rl.checkpoints.files import check_files
from megatron_rl.config import ParallelConfig
from megatron_rl.trainer.optimizer import loadable
from tests.megatron_rl.trainer.test_trainer import (
    ALGORITHMS,
    DP2,
    TP2,
    assembled,
    batch_for,
    finish_with,
    load_and_train,
    train_save_train,
    trainer_spec,
)
from tests.support.deadline import DEADLINE_S
from tests.support.trainers.saves import save, save_as_earlier_versions
from tests.support.trainers.tiny_megatron_models import save_model

ALGORITHM = ALGORITHMS["one update"]
ROOT = Path(__file__).resolve().parents[3]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.data())
def test_boxes_hold_a_range_of_elements_in_order(shape, data):
    whole = np.arange(np.prod(shape)).reshape(shape)
    begin = data.draw(st.integers(0, whole.size))
    end = data.draw(st.integers(begin, whole.size))
    found = boxes(shape, begin, end)
    parts = [whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] for box in found]
    assert [element for part in parts for element in part.ravel()] == list(range(begin, end))
    assert len(found) <= 2 * len(shape) - 1


class CopyingAdam(torch.optim.Adam):
    """Loads as Transformer Engine's Adam does."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: value.clone() for name, value in state.items()})


def test_moments_are_loaded_without_a_copy():
    weight = torch.nn.Parameter(torch.ones(3))
    adam = CopyingAdam([weight])
    moments = {"step": torch.tensor(2.0), "exp_avg": torch.full((3,), 0.5), "exp_avg_sq": torch.full((3,), 0.25)}
    saved = {"state": {0: moments}, "param_groups": adam.state_dict()["param_groups"]}
    adam.load_state_dict(saved)
    assert adam.state[weight]["exp_avg"] is not moments["exp_avg"]
    with loadable(SimpleNamespace(optimizer=adam)):
        adam.load_state_dict(saved)
    assert all(adam.state[weight][name] is moments[name] for name in ("exp_avg", "exp_avg_sq"))
    assert "load_state_dict" not in vars(adam)


PARTITIONS = [
    (DP2, ParallelConfig(), "qwen3_tied"),
    (DP2, TP2, "qwen3_tied"),
    (ParallelConfig(tensor=2, data=2), ParallelConfig(pipeline=2, data=2), "qwen3_tied"),
    (ParallelConfig(data=2, expert=2), ParallelConfig(data=2, expert=2), "qwen3_moe"),
    (TP2, DP2, "qwen3_moe"),
]


@pytest.mark.parametrize(("source", "target", "family"), PARTITIONS)
def test_a_sharded_optimizer_resumes_under_another_partition(ranks, tmp_path, source, target, family):
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_model(family, model)
    whole, resumed = (
        ranks.run(
            function,
            trainer_spec(model, parallel, ALGORITHM, distributed=True),
            batch_for(parallel, ALGORITHM),
            saved,
            parallel=parallel,
        )
        for function, parallel in ((train_save_train, source), (load_and_train, target))
    )
    found = assembled(resumed)
    for name, tensor in assembled(whole).items():
        if source == target:
            assert np.array_equal(tensor, found[name]), name
        a, b = (torch.from_numpy(t).view(torch.bfloat16).float() for t in (tensor, found[name]))
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize(("source", "target", "family"), PARTITIONS)
def test_the_policy_of_a_save_is_exported_without_a_trainer(ranks, tmp_path, source, target, family):
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_model(family, model)
    spec = trainer_spec(model, source, ALGORITHM, distributed=True)
    ranks.run(train_save_export, spec, batch_for(source, ALGORITHM), saved, tmp_path / "by_trainer", parallel=source)
    spec = replace(trainer_spec(model, target, ALGORITHM), exports=str(saved))
    ranks.run(export_save, spec, tmp_path / "by_save", parallel=target)
    first, trained, found = (weights_in(folder) for folder in (model, tmp_path / "by_trainer", tmp_path / "by_save"))
    assert trained.keys() == found.keys()
    for name, tensor in trained.items():
        assert torch.equal(tensor, found[name]), name
    assert any(not torch.equal(tensor, first[name]) for name, tensor in trained.items())


def train_save_export(position, parallel, spec, batch, saved, exported):
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    save(trainer, str(saved))
    trainer.export(str(exported))


def export_save(position, parallel, spec, exported):
    from megatron_rl.trainer.saves import SavedPolicy

    policy = SavedPolicy(spec, position)
    assert not any(hasattr(parameter, "main_grad") for parameter in policy._model.parameters())
    policy.export(str(exported))


def weights_in(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("target", [DP2, TP2])
def test_a_checkpoint_of_an_earlier_version_resumes(ranks, tmp_path, target):
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_model("qwen3_tied", model)
    spec, batch = trainer_spec(model, DP2, ALGORITHM, distributed=True), batch_for(DP2, ALGORITHM)
    whole = assembled(ranks.run(train_save_as_before_train, spec, batch, saved, parallel=DP2))
    assert "generators/shard_0.0.0_1.1.2" in check_files(saved)[1]  # pickled there, and never read
    spec, batch = trainer_spec(model, target, ALGORITHM, distributed=True), batch_for(target, ALGORITHM)
    found = assembled(ranks.run(load_and_train, spec, batch, saved, parallel=target))
    for name, tensor in whole.items():
        if target == DP2:
            assert np.array_equal(tensor, found[name]), name
        a, b = (torch.from_numpy(t).view(torch.bfloat16).float() for t in (tensor, found[name]))
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3, msg=name)


def train_save_as_before_train(position, parallel, spec, batch, path):
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    save_as_earlier_versions(trainer, str(path))
    return finish_with(trainer, batch)


@pytest.mark.parametrize(
    ("saved", "present", "message"),
    [
        (("bf16", False), ("bf16", True), r"saved with trainer\.optimizer\.distributed=false, .*; set it to false"),
        (("bf16", True), ("bf16", False), r"saved with trainer\.optimizer\.distributed=true, .*; set it to true"),
        (("fp32", True), ("fp32", False), r"saved with trainer\.optimizer\.distributed=true, .*; set it to true"),
        (("fp32", False), ("bf16", False), r"saved with trainer\.dtype=fp32, but it is bf16 now; set it to fp32"),
        (("bf16", False), ("fp32", True), r"; set it to false, and with trainer\.dtype=bf16, but it is fp32 now"),
    ],
)
def test_a_resume_with_another_kind_of_optimizer_is_refused_and_names_what_to_restore(
    ranks, tmp_path, saved, present, message
):
    save_model("qwen3", tmp_path / "model")
    batch = batch_for(ParallelConfig(), ALGORITHM)
    first, second = (
        with_dtype(trainer_spec(tmp_path / "model", ParallelConfig(), ALGORITHM, distributed=distributed), dtype)
        for dtype, distributed in (saved, present)
    )
    ranks.run(train_save_train, first, batch, tmp_path / "saved", parallel=ParallelConfig())
    with pytest.raises(RuntimeError, match=message):
        ranks.run(load_only, second, tmp_path / "saved", parallel=ParallelConfig())


def with_dtype(spec, dtype):
    return replace(spec, config=spec.config.model_copy(update={"dtype": dtype}))


class Allocations(TorchDispatchMode):
    """Most bytes at a time of the storages that operations create in the context."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {storage(each) for each in torch.utils._pytree.tree_leaves((args, kwargs)) if is_plain(each)}
        for each in torch.utils._pytree.tree_leaves(result):
            if is_plain(each) and storage(each) not in given and storage(each) not in self._alive:
                self._count(each.untyped_storage())
        return result

    def _count(self, memory: torch.UntypedStorage) -> None:
        key, size = memory._cdata, memory.nbytes()
        self._alive[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(memory, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def is_plain(value: object) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def test_a_save_allocates_only_the_rank_s_own_part(ranks, tmp_path):
    save_model("qwen3_tied", tmp_path)
    spec = trainer_spec(tmp_path, DP2, ALGORITHM, distributed=True)
    for peak, num_parameters, largest in ranks.run(
        peak_of_a_save, spec, batch_for(DP2, ALGORITHM), tmp_path / "saved", parallel=DP2
    ):
        # parameter, master and moments in FP32, each written by one of two ranks; one gathered state would be 4 N more
        own = 16 * num_parameters / DP2.data
        assert own / 2 < peak < 1.1 * own + 4 * largest


def peak_of_a_save(position, parallel, spec, batch, path):
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    with Allocations() as allocations:
        trainer.begin_save(str(path), background=True)
    trainer.finish_save()
    sizes = [parameter.numel() for parameter in trainer._model.parameters()]
    return allocations.peak, sum(sizes), max(sizes)


@pytest.mark.parametrize("distributed", [False, True])
def test_training_goes_on_while_a_save_is_written_and_does_not_change_it(ranks, tmp_path, distributed):
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_model("qwen3_tied", model)
    spec, batch = trainer_spec(model, DP2, ALGORITHM, distributed=distributed), batch_for(DP2, ALGORITHM)
    outcomes = ranks.run(train_while_a_save_is_held, spec, batch, saved, parallel=DP2)
    whole = assembled([outcome for outcome, *_ in outcomes])
    for _, seconds, files in outcomes:
        assert seconds is None
        assert files == {"common.pt"}
    found = assembled(ranks.run(load_and_train, spec, batch, saved, parallel=DP2))
    assert all(np.array_equal(tensor, found[name]) for name, tensor in whole.items())


def train_while_a_save_is_held(position, parallel, spec, batch, path):
    """A step, a save whose threads are held, a step, the end of the save."""
    from megatron_rl.trainer.trainer import Trainer

    gate, threads = threading.Event(), ThreadPoolExecutor(1)
    threads.submit(gate.wait, DEADLINE_S)
    trainer = Trainer(spec, position, writers=threads)
    trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
    trainer.begin_save(str(path), background=True)
    outcome = finish_with(trainer, batch)
    seconds, files = trainer.save_seconds(), {file.name for file in Path(path).iterdir()}
    torch.distributed.barrier()
    gate.set()
    trainer.finish_save()
    threads.shutdown()
    return outcome, seconds, files


def test_the_fourth_save_holds_the_fourth_step(ranks, tmp_path):
    """Plans of the first saves are used again."""
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_model("qwen3_tied", model)
    spec, batch = trainer_spec(model, DP2, ALGORITHM, distributed=True), batch_for(DP2, ALGORITHM)
    whole = assembled(ranks.run(train_and_save_four_times, spec, batch, saved, parallel=DP2))
    found = assembled(ranks.run(load_and_train, spec, batch, saved / "3", parallel=DP2))
    assert all(np.array_equal(tensor, found[name]) for name, tensor in whole.items())


def train_and_save_four_times(position, parallel, spec, batch, path):
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    for number in range(4):
        trainer.train(batch.of_rank(trainer.data_rank), lambda refs: refs)
        save(trainer, str(path / str(number)))
    return finish_with(trainer, batch)


def test_a_file_that_cannot_be_written_is_named_when_the_save_ends(ranks, tmp_path):
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_model("qwen3", model)
    (saved / "__0_1.distcp").mkdir(parents=True)
    spec = trainer_spec(model, ParallelConfig(), ALGORITHM)
    with pytest.raises(RuntimeError, match=r"Is a directory while a checkpoint was written: '.*/__0_1\.distcp'"):
        ranks.run(begin_and_finish, spec, saved, parallel=ParallelConfig())
    assert not (saved / "metadata.json").exists()


def begin_and_finish(position, parallel, spec, path):
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)
    trainer.begin_save(str(path), background=True)
    trainer.finish_save()


def test_after_a_death_in_a_save_the_checkpoint_before_it_is_the_newest_and_resumes(ranks, tmp_path):
    model, run_dir, single = tmp_path / "model", tmp_path / "checkpoints", ParallelConfig()
    save_model("qwen3_tied", model)
    run_dir.mkdir()
    spec, batch = trainer_spec(model, single, ALGORITHM), batch_for(single, ALGORITHM)
    command = [sys.executable, "-m", "tests.support.trainers.killed_save", str(model), str(run_dir)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * DEADLINE_S)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    # one of two files of step 2 is whole, the other one is not begun
    assert (run_dir / "2.partial" / "trainer" / "__0_0.distcp").stat().st_size
    assert not (run_dir / "2.partial" / "trainer" / "__0_1.distcp").exists()
    step, newest = Checkpoints(run_dir).latest()
    assert step == 1
    whole = assembled(ranks.run(train_save_train, spec, batch, tmp_path / "other", parallel=single))
    found = assembled(ranks.run(load_and_train, spec, batch, newest / "trainer", parallel=single))
    assert all(np.array_equal(tensor, found[name]) for name, tensor in whole.items())


class Planted:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self._marker),)


def plant_as_metadata(folder: Path, planted: Planted) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(planted))


def plant_in_metadata(folder: Path, planted: Planted) -> None:
    with editing(folder) as metadata:
        metadata.planner_data = planted


def plant_in_common(folder: Path, planted: Planted) -> None:
    torch.save({"partition": planted, "spread_experts": False}, folder / "common.pt")


def plant_as_object(folder: Path, planted: Planted) -> None:
    """Declare a tensor an object, which torch would load without its safe mode."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    with editing(folder) as metadata:
        point_to_planted(folder, metadata, planted)
        metadata.state_dict_metadata[TENSOR] = BytesStorageMetadata()


def plant_as_tensor(folder: Path, planted: Planted) -> None:
    with editing(folder) as metadata:
        point_to_planted(folder, metadata, planted)


TENSOR = "decoder.final_layernorm.weight"


@contextmanager
def editing(folder: Path):
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    yield metadata
    file.write_bytes(pickle.dumps(metadata))


def point_to_planted(folder: Path, metadata, planted: Planted) -> None:
    torch.save(planted, folder / "planted.distcp")
    for index, info in metadata.storage_data.items():
        if index.fqn == TENSOR:
            info.relative_path, info.offset = "planted.distcp", 0
            info.length = (folder / "planted.distcp").stat().st_size


PLANTS = {
    plant_as_metadata: r"\.metadata names `posix\.mkdir`",
    plant_in_metadata: r"\.metadata names `posix\.mkdir`",
    plant_in_common: r"common\.pt .*Weights only load failed",
    plant_as_object: r"\.metadata says that `decoder.final_layernorm.weight` is an object",
    plant_as_tensor: r"the tensors of .* cannot be read: .*Weights only load failed",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_pickle_is_refused_and_not_run(ranks, tmp_path, plant):
    model, saved, marker = tmp_path / "model", tmp_path / "saved", tmp_path / "marker"
    save_model("qwen3", model)
    spec = trainer_spec(model, ParallelConfig(), ALGORITHM)
    ranks.run(train_save_train, spec, batch_for(ParallelConfig(), ALGORITHM), saved, parallel=ParallelConfig())
    plant(saved, Planted(marker))
    with pytest.raises(RuntimeError, match=PLANTS[plant]):
        ranks.run(load_only, spec, saved, parallel=ParallelConfig())
    assert not marker.exists()
    pickle.loads(pickle.dumps(Planted(marker)))
    assert marker.exists()


def load_only(position, parallel, spec, path):
    from megatron_rl.trainer.trainer import Trainer

    Trainer(spec, position).load(str(path))


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_copies_equal_their_tensors_and_hold_no_other_bytes(device):
    from megatron_rl.checkpoints.writer import HostBuffer, _aligned

    buffer, places = HostBuffer(), []
    for size in (3, 1000, 10):  # the second save is larger, the third one smaller
        tensors = [torch.randn(size, 5, device=device, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
        tensors.append(torch.empty(0, device=device))
        buffer.reserve(sum(_aligned(tensor.nbytes) for tensor in tensors))
        copies = [buffer.copy(tensor) for tensor in tensors]
        places.append(copies[0].data_ptr())
        originals = [tensor.cpu().clone() for tensor in tensors]
        for tensor in tensors:
            tensor.add_(1)  # the run goes on
        if device == "cuda":
            torch.cuda.synchronize()
        for tensor, copy in zip(originals, copies, strict=True):
            assert torch.equal(tensor, copy)
            assert copy.untyped_storage().nbytes() == tensor.nbytes
            assert copy.is_pinned() == (device == "cuda") or not tensor.numel()
    assert places[1] == places[2], "memory is kept"

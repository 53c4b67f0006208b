"""Recorded copies are replayed without loaders; layers with any other operation still use their loaders."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import layerwise

from rollout.weights.manifest import Box, TensorSpec
from rollout.worker import loader_replay
from rollout.worker.loader_recording import Recording, StandIns

SHAPES = {
    **{"halves.upper": (2, 6), "halves.lower": (2, 6), "halves.bias": (4,)},
    **{"columns": (4, 12), "padded": (3, 6), "doubled": (4, 6), "summed": (4, 6), "partial": (2, 6)},
    "shared": (4, 6),
}
SPECS = tuple(TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items())
WHOLE = {spec.name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(7)) for spec in SPECS}


class Boxes:
    """Parts of tensors in memory."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A view."""
        self.asked.append(name)
        return WHOLE[name][box.slices((0,) * WHOLE[name].dim())]

    def views(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """A single piece."""
        yield box, self.read(name, box)


class Layer(nn.Module):
    """A weight [4, 6] and a bias."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]
        self.num_calls = 0

    def load(self, param: torch.Tensor, loaded: torch.Tensor, how: str) -> None:
        """Load like vLLM's layers, in each of their ways."""
        self.num_calls += 1
        rows = {"upper": slice(0, 2), "lower": slice(2, 4), "padded": slice(0, 3), "partial": slice(0, 2)}
        source = loaded[:, 6:] if how == "columns" else loaded
        param.data[rows.get(how, slice(0, 4))].copy_(source.to(torch.float64) if how == "cast" else source)
        match how:
            case "padded":
                param.data[3:].fill_(0.0)
            case "doubled":
                param.data.mul_(2.0)
            case "summed":
                self.total = param.data.sum()


class Model(nn.Module):
    """Layers by their way of loading."""

    def __init__(self) -> None:
        super().__init__()
        names = ("columns", "padded", "doubled", "summed", "partial")
        self.layers = nn.ModuleDict({"halves": Layer(bias=True)} | {name: Layer() for name in names})
        self.layers["twin"], self.layers["odd_twin"] = Layer(), Layer()

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Give every tensor to its layer; one tensor goes to two layers."""
        for name, loaded in weights:
            layer, _, how = name.partition(".")
            if name == "halves.bias":
                bias = self.layers["halves"].bias
                getattr(bias, "weight_loader", lambda param, loaded: param.data.copy_(loaded))(bias, loaded)
            elif name == "shared":
                for twin, way in (("twin", "whole"), ("odd_twin", "doubled")):
                    weight = self.layers[twin].weight
                    weight.weight_loader(weight, loaded, way)
            else:
                weight = self.layers[layer].weight
                weight.weight_loader(weight, loaded, how or layer)


def model() -> Model:
    built = Model()
    layerwise.record_metadata_for_reloading(built)
    return built


def test_only_layers_filled_by_copies_alone_are_plain() -> None:
    recording = StandIns(SPECS).record(model())
    assert recording.plain == {"layers.halves", "layers.columns", "layers.twin"}
    # the twin's tensor goes to a layer that needs its loader
    assert loader_replay.replayed(recording) == {"layers.halves", "layers.columns"}


def test_a_cast_tensor_does_not_count_as_a_copy() -> None:
    layers = model()
    cast = TensorSpec(name="halves.cast", shape=(4, 6), dtype="float32")
    with pytest.raises(RuntimeError, match=r"do not copy halves\.cast"):
        StandIns([cast]).record(layers)


def test_replayed_copies_equal_loaded_ones_in_the_order_of_tensors() -> None:
    layers, stand_ins = model(), StandIns(SPECS)
    recording = stand_ins.record(layers)
    loaders = {name: layer.weight.weight_loader for name, layer in layers.layers.items()}
    for layer in layers.layers.values():
        layer.num_calls = 0
    for _ in range(2):  # a publish after the other
        source = Boxes()
        layerwise.initialize_layerwise_reload(layers)
        found = list(loader_replay.steps(SPECS, recording))
        assert found[:2] == ["layers.halves", "layers.columns"]
        assert [spec.name for spec in found[2]] == ["padded", "doubled", "summed", "partial", "shared"]
        with stand_ins.feed(source), torch.no_grad():
            for step in found:
                if isinstance(step, str):
                    landings = [one for one in recording.landings if one.module == step]
                    loader_replay.load(layers.get_submodule(step), landings, source)
                else:
                    layers.load_weights(stand_ins.items(step))
            layerwise.finalize_layerwise_reload(layers, None)
        weights = {name: layer.weight for name, layer in layers.layers.items()}
        assert torch.equal(weights["halves"], torch.cat([WHOLE["halves.upper"], WHOLE["halves.lower"]]))
        assert torch.equal(layers.layers["halves"].bias, WHOLE["halves.bias"])
        assert torch.equal(weights["columns"], WHOLE["columns"][:, 6:])
        assert torch.equal(weights["padded"][:3], WHOLE["padded"]) and not weights["padded"][3:].any()
        assert torch.equal(weights["doubled"], 2 * WHOLE["doubled"])
        assert torch.equal(weights["twin"], WHOLE["shared"]) and torch.equal(weights["odd_twin"], 2 * WHOLE["shared"])
        assert source.asked[:4] == ["halves.upper", "halves.lower", "halves.bias", "columns"]
    assert not layers.layers["halves"].num_calls and not layers.layers["columns"].num_calls
    assert layers.layers["padded"].num_calls
    assert {name: layer.weight.weight_loader for name, layer in layers.layers.items()} == loaders


def test_a_failed_copy_restores_the_loaders() -> None:
    class Broken(Boxes):
        def read(self, name: str, box: Box) -> torch.Tensor:
            raise RuntimeError("lost")

    layers = model()
    recording = StandIns(SPECS).record(layers)
    layerwise.initialize_layerwise_reload(layers)
    layer = layers.layers["halves"]
    before = layer.weight.weight_loader
    landings = [one for one in recording.landings if one.module == "layers.halves"]
    with pytest.raises(RuntimeError, match="lost"):
        loader_replay.load(layer, landings, Broken())
    (meta, _) = layerwise.get_layerwise_info(layer).restore_metadata
    assert meta["weight"].weight_loader == before


def test_tensors_without_recording_are_not_replayed() -> None:
    assert list(loader_replay.steps(SPECS[:2], Recording((), frozenset()))) == [SPECS[:2]]

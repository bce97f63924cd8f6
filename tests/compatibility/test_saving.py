"""Copies of every layer and network: deepcopy, pickle, torch.save, state dicts read safely."""

import copy
import io
import pickle

import pytest
import torch

from catalogue import CASES, MODES, case, run


def by_torch_save(module):
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@MODES
@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), by_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("name", CASES)
def test_copies_compute_the_same(name, how, train):
    module, x = case(name, train)
    twin = how(module)
    assert twin.training == train
    for found, wanted in zip(run(twin, x), run(module, x), strict=True):
        assert torch.equal(found, wanted)
    ours = {id(t) for t in module.state_dict(keep_vars=True).values()}
    assert not ours & {id(t) for t in twin.state_dict(keep_vars=True).values()}


@MODES
@pytest.mark.parametrize("name", CASES)
def test_states_are_read_without_trust_in_either_mode(name, train):
    module, x = case(name, train)
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    torch.manual_seed(5)
    other = CASES[name][0]().train(not train)
    kept = torch.load(stream, weights_only=True)
    assert list(kept) == list(other.state_dict())
    other.load_state_dict(kept)
    for found, wanted in zip(run(other.train(train), x), run(module, x), strict=True):
        assert torch.equal(found, wanted)

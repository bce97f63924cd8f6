"""Saved networks: two files, whole and readable, or a clear error; nothing is unpickled."""

import functools
import json
import pickle
import re
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import econv
from catalogue import trained
from econv import Group, from_pretrained, operator_set
from econv.models import MODELS, ConvNet, ResNet, create_model
from econv.pretrained import FORMAT, Pretrained, _check_arguments
from econv.stencils import Central, Gaussian, Isotropic

safetensors = pytest.importorskip("safetensors.torch")


def small(**options):
    return ResNet(**{"group": "p4", "depth": 8, "fields": (1, 2, 2), **options})


def saved(folder, **options):
    network = trained(lambda: small(**options))
    network.save_pretrained(folder)
    return network


def change(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**config, **changes}.items() if v is not ...}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: small(num_classes=3, in_channels=2, pool="max", exact=True, stem=3),
        lambda: small(group=None),
        lambda: small(group=Group("p6m"), options={"stencils": "central", "accuracy": 4}),
        lambda: small(options={"stencils": Gaussian(width=0.8), "size": 7}),
        lambda: small(options={"stencils": Central(4)}),
        lambda: small(options={"stencils": Isotropic(8), "padding_mode": "circular"}),
        lambda: small(options={"operators": operator_set("order<=2")}),
        lambda: small(options={"operators": [(0, 0), (2, 0), (0, 2)]}),
        lambda: small(fields=tuple(np.array([1, 2, 2])), num_classes=np.int64(4)),
        lambda: ConvNet("p8", fields=(1, 2), dropout=0.0, pooled_after=(1,), image_size=20),
        lambda: create_model("convnet6_p6m", fields=(1,) * 6),
        lambda: create_model("cifar_resnet8_p4", fields=(1, 1, 2), drop_rate=0.1),
        lambda: create_model("convnet7_p8", fields=(1,) * 7),
    ],
)
def test_a_network_comes_back_as_it_was(make, tmp_path):
    network = trained(make)
    network.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = from_pretrained(tmp_path)
    assert type(again) is type(network)
    assert not again.training
    assert list(again.state_dict()) == list(network.state_dict())
    for name, value in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    for a, b in zip(again.modules(), network.modules(), strict=True):
        assert a.extra_repr() == b.extra_repr()
    assert all(p.requires_grad for p in again.parameters())
    shape = (2, network.config["in_channels"], network.config.get("image_size", 28))
    x = torch.randn(*shape, shape[-1])
    assert torch.equal(again(x), network.eval()(x))
    again.save_pretrained(tmp_path / "again")
    config = tmp_path / "config.json"
    assert (tmp_path / "again" / "config.json").read_bytes() == config.read_bytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_is_kept(dtype, tmp_path):
    network = small(exact=True).to(dtype)
    network.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    x = torch.randn(1, 3, 20, 20, dtype=dtype)
    assert torch.equal(again(x), network.eval()(x))


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_says_how_it_is_made(name):
    with torch.device("meta"):
        model = create_model(name)
        again = type(model)(
            **json.loads(json.dumps({**model.config, "group": MODELS[name][1]["group"]}))
        )
    assert {n: p.shape for n, p in again.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    # A group says which dimension it is of.
    wanted = set(type(model).__init__.__annotations__) - {"return", "dimension"}
    assert set(model.config) - {"dimension"} == wanted
    assert model.config["drop_rate" if "resnet" in name else "dropout"] >= 0


def test_a_file_says_what_it_is(tmp_path):
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["library_name"] == "econv"
    assert config["model_type"] == "ResNet"
    assert config["format"] == FORMAT
    assert config["econv_version"] == econv.__version__
    assert config["arguments"]["group"] == "p4"


def test_the_class_is_asked_for_its_own_networks(tmp_path):
    saved(tmp_path)
    assert isinstance(ResNet.from_pretrained(tmp_path), ResNet)
    with pytest.raises(ValueError, match="expected a ConvNet; it is a ResNet"):
        ConvNet.from_pretrained(tmp_path)


def test_networks_of_ones_own_can_be_saved(tmp_path):
    class Mine(Pretrained):
        def __init__(self, width, group):
            super().__init__()
            self.config = {"width": width, "group": group}
            self.lift = econv.LiftConv2d(1, width, group)

        def forward(self, x):
            return self.lift(x)

    network = Mine(2, "p4")
    network.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert type(again) is Mine
    assert torch.equal(again.lift.weight, network.lift.weight)
    network.config["width"] = nn.ReLU()
    with pytest.raises(ValueError, match=r"config\.width as numbers.*got ReLU"):
        network.save_pretrained(tmp_path)


# Files that are not what they should be


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated_files_are_refused(name, share, tmp_path):
    saved(tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=f"{re.escape(name)} is not .*, or truncated"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"library_name": "timm"}, "does not describe a network of econv"),
        ({"library_name": ...}, "does not describe a network of econv"),
        ({"format": FORMAT + 1}, f"has format {FORMAT + 1}; this version of econv reads 1 to"),
        ({"format": "1"}, "has format '1'"),
        ({"model_type": "os.system"}, "unknown model_type 'os.system'; expected one of"),
        ({"model_type": 3}, "lacks model_type"),
        ({"arguments": []}, "lacks model_type"),
        ({"arguments": {"group": "p8"}}, "describe different networks"),
    ],
)
def test_wrong_configurations_are_refused(changes, message, tmp_path):
    saved(tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        from_pretrained(tmp_path)


def without_metadata(folder, **changes):
    state = safetensors.load_file(folder / "model.safetensors")
    state = {k: v for k, v in {**state, **changes}.items() if v is not None}
    safetensors.save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 9}, "arguments that ResNet does not take: expected a depth of 6n + 2"),
        ({"colour": 1}, "arguments that ResNet does not take"),
        ({"group": "q4"}, "arguments that ResNet does not take"),
        (
            {"options": {"stencils": {"stencil_set": "magic"}}},
            "does not take: unknown stencil_set 'magic'",
        ),
        ({"num_classes": 11}, "classifier.weight is [10, 8], expected [11, 8]"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, tmp_path):
    network = saved(tmp_path)
    without_metadata(tmp_path)
    from_pretrained(tmp_path)  # files that others wrote have no metadata
    change(tmp_path, arguments={**network.config, "group": "p4", **arguments})
    with pytest.raises(ValueError, match=re.escape(message)):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lift.weight": None}, "lift.weight is missing"),
        ({"other": torch.zeros(3)}, "other is unknown"),
        ({"lift.weight": torch.zeros(1, 3, 8)}, "lift.weight is [1, 3, 8], expected [1, 3, 9]"),
        (
            {"lift.weight": torch.zeros(1, 3, 9, dtype=torch.int64)},
            "lift.weight is I64, expected BF16 or F16 or F32 or F64",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(changes, message, tmp_path):
    saved(tmp_path)
    without_metadata(tmp_path, **changes)
    with pytest.raises(ValueError, match=re.escape(f"does not fit ResNet: {message}")):
        from_pretrained(tmp_path)


BOMBS = {
    "a group": ({"group": "p20000"}, "expected group of order 360 at most; got 'p20000'"),
    "a group of many digits": ({"group": "p" + "9" * 5000}, "expected group of order 360 at most"),
    "operators": (
        {"options": {"operators": "order<=40"}},
        "expected operators of order 12 at most; got 'order<=40'",
    ),
    "exponents": ({"options": {"operators": [[0, 0], [4000, 0]]}}, "operators of order 12 at most"),
    "a size": ({"options": {"size": 51}}, "expected size of at most 25; got 51"),
    "an accuracy": (
        {"options": {"stencils": {"stencil_set": "central", "accuracy": 64}}},
        "expected accuracy of at most 16; got 64",
    ),
    "several at once": (
        {"group": "p360", "options": {"operators": "order<=8", "size": 21}},
        "expected at most 200 times the work of a layer of p8",
    ),
    "a depth": ({"depth": 6_000_002}, "expected depth of at most"),
    "a depth within that": ({"depth": 1202}, "tensors of model.safetensors; this one is larger"),
    "widths": ({"fields": [4000] * 3}, "tensors of model.safetensors; this one is larger"),
    "wider ones": ({"fields": [20_000] * 3}, "expected fields of at most"),
    "classes": ({"num_classes": 10**30}, "expected num_classes of at most"),
    "levels": (
        {"options": functools.reduce(lambda a, _: [a], range(500), [])},
        "at most 16 levels",
    ),
    "NaN": ({"drop_rate": float("nan")}, "expected numbers; got NaN"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_configurations_that_ask_for_too_much_are_refused_at_once(tmp_path, bomb):
    network = saved(tmp_path)
    without_metadata(tmp_path)
    from_pretrained(tmp_path)
    arguments, message = BOMBS[bomb]
    change(tmp_path, arguments={**network.config, "group": "p4", **arguments})
    before = time.process_time()
    with pytest.raises(ValueError, match=re.escape(message)):
        from_pretrained(tmp_path)
    assert time.process_time() - before < 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": ' + b"[" * 500_000, "is nested too deeply"),
        (b" " * (2 << 20), "expected a configuration of at most 1048576 bytes; got more"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"format": 1e999}', "does not describe a network"),
    ],
)
def test_configurations_that_no_network_has_are_refused(tmp_path, content, message):
    saved(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)


def test_a_network_of_ones_own_takes_what_it_likes(tmp_path):
    class Own(Pretrained):
        def __init__(self, size, seed):
            super().__init__()
            self.config = {"size": size, "seed": seed}
            self.weight = nn.Parameter(torch.zeros(size))

        def forward(self, x):
            return x

    Own(224, 10**9).save_pretrained(tmp_path)
    assert from_pretrained(tmp_path).weight.shape == (224,)
    without_metadata(tmp_path)
    change(tmp_path, arguments={"size": 10**5, "seed": 0})
    with pytest.raises(ValueError, match="this one is larger"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("classifier.weight", lambda x: x.to(torch.float8_e4m3fn), "is F8_E4M3, expected BF16 or"),
        ("classifier.weight", lambda x: x.to(torch.complex64), "is C64, expected BF16 or"),
        ("classifier.weight", lambda x: x * torch.nan, "has NaN or infinity"),
        ("running_var", lambda x: x - 10, "is negative"),
        ("running_mean", lambda x: x + torch.inf, "has NaN or infinity"),
        ("num_batches_tracked", lambda x: x.int(), "is I32, expected I64"),
        ("num_batches_tracked", lambda x: x - 100, "is negative"),
    ],
)
def test_numbers_that_no_training_leaves_are_refused(tmp_path, name, change, message):
    saved(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    (chosen, *_) = [key for key in state if key.endswith(name)]
    without_metadata(tmp_path, **{chosen: change(state[chosen])})
    with pytest.raises(ValueError, match=f"does not fit .*: {re.escape(chosen)} {message}"):
        from_pretrained(tmp_path)


def test_a_flood_of_tensors_is_refused(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setattr(econv.pretrained, "_MOST_TENSORS", 5)
    with pytest.raises(ValueError, match=r"expected at most 5 tensors; got \d\d"):
        from_pretrained(tmp_path)


def test_pickles_are_not_read(tmp_path):
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match=r"expected model.safetensors in .*pytorch_model.bin"):
        from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(small().state_dict()))
    with pytest.raises(ValueError, match="is not a safetensors file"):
        from_pretrained(tmp_path)


def test_what_is_neither_folder_nor_name_is_refused(tmp_path):
    for source in (tmp_path / "missing", "./missing", "missing", "", "a/b/c", "../a"):
        with pytest.raises(ValueError, match=r"no weights named|is neither"):
            from_pretrained(source)


def test_an_interrupted_save_leaves_the_old_network_or_says_so(tmp_path, monkeypatch):
    old = saved(tmp_path)
    writes = []

    def fails_at(number):
        def write(path, content):
            writes.append(path)
            if len(writes) == number:
                raise KeyboardInterrupt
            original(path, content)

        return write

    original = econv.pretrained.write_atomically
    other = small(group="p4m")
    for number in (1, 2):
        writes.clear()
        monkeypatch.setattr(econv.pretrained, "write_atomically", fails_at(number))
        with pytest.raises(KeyboardInterrupt):
            other.save_pretrained(tmp_path)
        if number == 1:
            assert torch.equal(from_pretrained(tmp_path).lift.weight, old.lift.weight)
    with pytest.raises(ValueError, match="describe different networks"):
        from_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("library", ["safetensors.torch", "huggingface_hub"])
def test_a_missing_library_is_named(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    network = small()
    use = from_pretrained if library == "huggingface_hub" else network.save_pretrained
    with pytest.raises(ImportError, match=r"pip install 'econv\[hub\]'"):
        use("owner/name")


# The hub


class Hub(types.ModuleType):
    """What is used of huggingface_hub, on a folder."""

    def __init__(self, folder):
        super().__init__("huggingface_hub")
        self.folder = Path(folder)
        self.asked = []

    def hf_hub_download(self, repo_id, filename, **options):
        self.asked.append((repo_id, filename, options))
        path = self.folder / repo_id / filename
        if not path.exists():
            raise FileNotFoundError(f"404: no {filename}\nand a long explanation")
        return str(path)

    def HfApi(self, token=None):
        self.token = token
        return self

    def create_repo(self, repo_id, private, exist_ok):
        assert exist_ok
        return types.SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, repo_id, folder_path, commit_message):
        target = self.folder / repo_id
        target.mkdir(parents=True)
        for path in Path(folder_path).iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        return types.SimpleNamespace(commit_url=f"hub:{repo_id}")


def test_networks_are_shared_by_name(tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    network = small()
    assert network.push_to_hub("spin", token="secret") == "hub:me/spin"
    assert hub.token == "secret"
    again = from_pretrained("me/spin", revision="v1", local_files_only=True)
    assert torch.equal(again.lift.weight, network.lift.weight)
    assert [name for _, name, _ in hub.asked] == ["config.json", "model.safetensors"]
    for repo_id, _, options in hub.asked:
        assert repo_id == "me/spin"
        assert options["revision"] == "v1"
        assert options["local_files_only"] is True
    with pytest.raises(
        ValueError, match=r"cannot read config.json of 'me/other' from the Hub: 404"
    ):
        from_pretrained("me/other")


def test_the_real_hub_library_takes_what_it_is_given(tmp_path):
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ValueError, match=r"cannot read config.json of 'econv/none' from the Hub"):
        from_pretrained("econv/none", local_files_only=True, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"group": "p8"}, True),
        ({"operators": "order<=4"}, True),
        ({"operators": "order<=12"}, True),
        ({"operators": "order<=12", "group": "p64"}, False),
        ({"operators": "order <= 12", "group": "p64"}, False),
        ({"operators": "order<=12@5", "group": "p64"}, False),
        ({"size": 25, "group": "p64"}, True),
        ({"size": 25, "group": "p72"}, False),
    ],
)
def test_the_work_that_arguments_ask_for_is_counted(arguments, fits):
    if fits:
        _check_arguments(Path("x"), arguments, 4096)
    else:
        with pytest.raises(ValueError, match=r"expected"):
            _check_arguments(Path("x"), arguments, 4096)

"""Published weights: found by name, whole, what they say of themselves, and checked again."""

import argparse
import hashlib
import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import econv
import publish_weights
import tiny_training
from econv import cli, records, train, verify
from econv.pretrained import weights_folders
from econv.train import publishing
from econv.weights import Transforms, Weights, named

CHECKOUT = Path(__file__).parents[1]
COMMITTED = CHECKOUT / "weights"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tiny_training.start(folder, weights=folder / "weights")
    return folder


@pytest.fixture
def tiny(published: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the published folder, which the environment names."""
    shutil.copytree(published, tmp_path / "run")
    monkeypatch.setenv("ECONV_WEIGHTS", str(tmp_path / "run" / "weights"))
    monkeypatch.setattr(verify.data_room, "load", lambda *_, **__: tiny_training.stripes())
    return tmp_path / "run"


def checked(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    return verify.main(parser.parse_args([*map(str, arguments), "--quiet", "--device", "cpu"]))


def edited(folder: Path, **changes: object) -> None:
    path = folder / "weights" / "tiny" / "config.json"
    config = json.loads(path.read_text())
    config["weights"].update(changes)
    path.write_text(json.dumps(config))


def test_committed_weights_are_those_of_their_records() -> None:
    names = sorted(path.parent.name for path in COMMITTED.glob("*/config.json"))
    assert "digits_p8" in names
    for name in names:
        weights = Weights.find(COMMITTED / name)
        run = (weights.recipe, weights.seed, weights.data_seed)
        place = records.path_of(CHECKOUT / "records", *run)
        record = records.load(place)
        assert hashlib.sha256(place.read_bytes()).hexdigest() == weights.record_sha256
        assert record.predictions_sha256 == weights.predictions_sha256
        assert record.test_error == weights.metrics["test_error"]
        assert f"{record.test_error:.2f} %" in (COMMITTED / name / "README.md").read_text()
    assert publish_weights.size_of(COMMITTED) <= publish_weights.LARGEST


def test_the_embedded_digits_are_verified_from_the_shell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["verify", "digits_p8", "--quiet", "--device", "cpu"]) == 0
    assert "digits_p8: verified" in capsys.readouterr().out


def test_a_run_publishes_what_it_predicts(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked("tiny", "--records", tiny / "records") == 0
    told = capsys.readouterr().out
    assert "tiny: verified, all 50 predictions are the record's" in told
    weights = Weights.find("tiny")
    data = tiny_training.stripes()
    network = weights.load()
    with torch.no_grad():
        found = network(weights.transforms()(data.test.x)).argmax(1)
    wrong = 100 * float((found != data.test.y).double().mean())
    assert wrong == pytest.approx(weights.metrics["test_error"])
    assert weights.classes == ("0", "1", "2")


def test_the_statistics_are_those_of_the_images_it_was_trained_on(
    published: Path, tmp_path: Path
) -> None:
    data = tiny_training.stripes()
    assert Weights.find(published / "weights" / "tiny").mean == data.mean
    both = tiny_training.changed(retrain_on_all=True)
    tiny_training.start(tmp_path, both, weights=tmp_path / "weights")
    found = Weights.find(tmp_path / "weights" / "tiny")
    assert (found.mean, found.std) == (
        data.with_validation_in_training().mean,
        data.with_validation_in_training().std,
    )
    assert found.mean != data.mean


def test_a_finished_run_publishes_without_training(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.loop.Loop, "train", None)
    options = {"output": published / "out", "records": published / "records"}
    tiny_training.start(tmp_path, weights=tmp_path / "weights", **options)
    first, again = (f / "weights" / "tiny" / "config.json" for f in (published, tmp_path))
    assert first.read_bytes() == again.read_bytes()


def test_a_weight_that_was_changed_fails(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = econv.from_pretrained("tiny")
    with torch.no_grad():
        network.classifier.weight.neg_()
    told = Weights.find("tiny").entry()
    network._write(tiny / "weights" / "tiny", {"weights": told})
    assert checked("tiny") == 1
    assert "tiny: FAILED, not all of 50 predictions are the record's" in capsys.readouterr().out
    edited(tiny, dtype="float16")
    assert checked("tiny") == 1
    assert "tiny: FAILED, not the record's error" in capsys.readouterr().out


def test_other_predictions_of_the_same_error_pass_for_half_precision_only(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(tiny, predictions_sha256="0" * 64)
    assert checked("tiny") == 1
    edited(tiny, dtype="float16")
    assert checked("tiny") == 0
    assert "the record's error, to rounding" in capsys.readouterr().out


def test_other_images_and_another_record_are_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify.data_room, "load", lambda *_, **__: tiny_training.stripes(1))
    assert checked("tiny") == 1
    assert "expected the images of the record; those of stripes are others" in (
        capsys.readouterr().err
    )
    edited(tiny, record_sha256="0" * 64)
    assert checked("tiny", "--records", tiny / "records") == 1
    assert f"with the SHA-256 {'0' * 64}" in capsys.readouterr().err


def test_images_that_are_not_here_are_skipped_by_all_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise verify.DataError("stripes.npz is missing: get it from somewhere")

    monkeypatch.setattr(verify.data_room, "load", missing)
    monkeypatch.setattr(verify, "named", lambda: ["tiny"])
    assert checked("--all") == 1
    told = capsys.readouterr()
    assert "tiny: skipped, stripes.npz is missing" in told.out
    assert "no images of any weights are here; --source says where" in told.err
    assert checked("tiny") == 1
    assert "econv verify: tiny: stripes.npz is missing: get it" in capsys.readouterr().err


def test_weights_that_are_missing_are_named_with_where_to_get_them(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked("nothing") == 1
    told = capsys.readouterr().err
    assert "no weights named 'nothing' in" in told
    assert ", tiny. They are in the folder weights/nothing of econv's" in told
    (tiny / "weights" / "tiny" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected model.safetensors in .*tiny: They are in the"):
        econv.from_pretrained("tiny")
    assert checked() == 1
    assert "expected names of weights, or --all; found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": []}, "expected a mean and a std for each channel"),
        ({"std": [0.0]}, "expected stds above 0"),
        ({"size": [12]}, "expected size as height and width"),
        ({"seed": True}, "expected seed of another kind; got True"),
        ({"test_angles": -3}, "expected test_angles of 0 or more; got -3"),
        ({"recipe": "../../etc"}, "expected recipe as a name, not a path; got '../../etc'"),
        ({"recipe": ".."}, "expected recipe as a name, not a path"),
        ({"classes": [1]}, "expected classes as names"),
        ({"metrics": {}}, "expected metrics with test_error and validation_error"),
        ({"more": 1}, "expected 'weights' with classes, data_seed"),
    ],
)
def test_a_damaged_card_is_refused(tiny: Path, changes: dict[str, object], message: str) -> None:
    edited(tiny, **changes)
    with pytest.raises(ValueError, match=message):
        Weights.find("tiny")


def test_folders_are_searched_in_order(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights_folders()[0] == tiny / "weights"
    assert {"digits_p8", "tiny"} <= set(named())
    assert named("t*y") == ["tiny"]
    monkeypatch.delenv("ECONV_WEIGHTS")
    assert "tiny" not in named()
    assert Weights.find(tiny / "weights" / "tiny").name == "tiny"


def test_files_of_others_among_weights_are_passed_over_and_damaged_ones_are_not(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny / "weights" / "bert" / "config.json"
    other.parent.mkdir()
    for content in ('{"model_type": "bert"}', "[]"):
        other.write_text(content)
        assert named("[bt]*") == ["tiny"]
    other.write_text('{"library_name": "econv"')
    for arguments in (["--all"], []):
        assert checked(*arguments) == 1
        assert f"econv verify: {other} is not JSON, or truncated" in capsys.readouterr().err


def test_create_model_takes_weights_of_that_network_alone(tiny: Path) -> None:
    network = econv.create_model("convnet6_p4", weights="tiny")
    assert network.config["fields"] == [2, 3]
    assert not network.training
    assert econv.list_models("ti*", weights=True) == ["tiny"]
    with pytest.raises(
        ValueError,
        match=r"weights of convnet6_p8, of which there are digits_p8, .*; tiny are of conv",
    ):
        econv.create_model("convnet6_p8", weights="tiny")
    with pytest.raises(ValueError, match="expected options that leave the weights of tiny as they"):
        econv.create_model("convnet6_p4", weights="tiny", fields=(3, 3))
    image = torch.rand(2, 1, 12, 12)
    other = econv.create_model("convnet6_p4", weights=Weights.find("tiny"), dropout=0.5)
    assert other.config["dropout"] == 0.5
    assert torch.equal(other(image), network(image))


def test_another_number_of_classes_keeps_the_features_and_says_so(tiny: Path) -> None:
    whole = econv.from_pretrained("tiny")
    with pytest.warns(UserWarning, match="tiny has 3 classes: the features are kept, the last"):
        other = econv.from_pretrained("tiny", num_classes=5)
    image = torch.rand(2, 1, 12, 12)
    assert other(image).shape == (2, 5)
    assert torch.equal(other.forward_features(image), whole.forward_features(image))
    with pytest.warns(UserWarning, match="is new"):
        assert econv.create_model("convnet6_p4", weights="tiny", num_classes=2).num_classes == 2
    assert econv.from_pretrained("tiny", num_classes=3).num_classes == 3


def test_large_weights_are_halved_and_load_in_float32(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_HALVED", 0)
    record = records.load(published / "records" / "tiny" / "0.json")
    arguments = (published / "out" / "tiny" / "0", tiny_training.stripes(), published / "records")
    made = train.publish(record, *arguments, tmp_path, "cpu", progress=False)
    assert made.dtype == "float16"
    network, whole = made.load(), Weights.find(published / "weights" / "tiny").load()
    for name, value in network.state_dict().items():
        assert value.dtype == whole.state_dict()[name].dtype
        if value.is_floating_point() and value.ndim > 1:
            assert torch.equal(value, whole.state_dict()[name].half().float())
        else:
            assert torch.equal(value, whole.state_dict()[name])


def test_weights_of_data_that_were_made_again_are_checked_on_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = replace(tiny_training.stripes(3), seed=3)
    tiny_training.start(tmp_path, data=data, weights=tmp_path / "weights")
    monkeypatch.setenv("ECONV_WEIGHTS", str(tmp_path / "weights"))

    def load(*_: object, seed: int, **__: object) -> Any:
        return replace(tiny_training.stripes(seed), seed=seed)

    monkeypatch.setattr(verify.data_room, "load", load)
    found = Weights.find("tiny")
    assert found.data_seed == 3
    assert "econv train tiny --data-seed 3" in (found.folder / "README.md").read_text()
    assert "records/tiny/0-data3.json" in (found.folder / "README.md").read_text()
    assert checked("tiny", "--records", tmp_path / "records") == 0
    edited(tmp_path, record_sha256="0" * 64)
    assert checked("tiny", "--records", tmp_path / "records") == 1
    assert "0-data3.json with the SHA-256" in capsys.readouterr().err
    edited(tmp_path, data_seed=0)
    assert checked("tiny", "--records", tmp_path / "none") == 1
    assert "expected the images of the record" in capsys.readouterr().err


def test_volumes_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tiny_training.stripes()
    splits = {name: getattr(data, name) for name in ("train", "validation", "test")}
    data = replace(data, **{n: replace(s, x=s.x[:, None]) for n, s in splits.items()})
    monkeypatch.setattr(train.loop.Loop, "train", None)
    with pytest.raises(ValueError, match=r"expected images with weights, .*\(70, 1, 1, 12, 12\)"):
        tiny_training.start(tmp_path, data=data, weights=tmp_path / "weights")


def test_what_is_not_the_records_is_not_published(published: Path, tmp_path: Path) -> None:
    record = records.load(published / "records" / "tiny" / "0.json")
    run = published / "out" / "tiny" / "0"
    with pytest.raises(train.CheckpointError, match="expected the images of the record of tiny"):
        train.publish(record, run, tiny_training.stripes(1), published / "records", tmp_path)
    with pytest.raises(train.CheckpointError, match=r"not there: train with --fresh, or name"):
        train.publish(record, tmp_path, tiny_training.stripes(), published / "records", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"others")
    with pytest.raises(train.CheckpointError, match="holds other weights than those of the record"):
        train.publish(record, tmp_path, tiny_training.stripes(), published / "records", tmp_path)


def test_transforms_say_which_images_they_take() -> None:
    ready = Transforms((0.5, 0.5), (0.5, 1.0), (4, 4), disc=True)
    bytes_ = torch.full((1, 2, 4, 4), 255, dtype=torch.uint8)
    found = ready(bytes_)
    assert float(found[0, 0, 2, 2]) == 2 * float(found[0, 1, 2, 2]) > 0
    torch.testing.assert_close(found, ready(torch.ones(1, 2, 4, 4)))
    assert found[0, 0, 0, 0] == 0
    with pytest.raises(ValueError, match=r"images \[batch, 2, height, width\]; got \[1, 3"):
        ready(torch.zeros(1, 3, 4, 4))


def test_weights_are_found_in_a_repository_of_the_hub(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = types.ModuleType("huggingface_hub")
    hub.hf_hub_download = lambda _, name, **__: str(tiny / "weights" / "tiny" / name)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert Weights.find("somebody/tiny").metrics == Weights.find("tiny").metrics
    image = torch.rand(1, 1, 12, 12)
    ours = econv.create_model("convnet6_p4", weights="somebody/tiny")
    assert torch.equal(ours(image), econv.from_pretrained("tiny")(image))


def test_a_network_without_a_card_is_none(tmp_path: Path) -> None:
    econv.create_model("convnet6_p4").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected 'weights' with classes, .*; got NoneType"):
        Weights.find(tmp_path)


@pytest.mark.parametrize(
    ("precision", "count", "holds"),
    [("float32", 0, True), ("float32", 1, False), ("tf32", 0, True), ("tf32", 1, False)],
)
def test_only_coarse_records_may_be_missed_by_rounding(
    tiny: Path, precision: str, count: int, holds: bool
) -> None:
    """One of 50 images is 2 %: more than rounding explains in any arithmetic."""
    edited(tiny, precision=precision)
    weights = Weights.find("tiny")
    classes = torch.zeros(50, dtype=torch.int64)
    error = weights.metrics["test_error"] + 2.0 * count
    found = publishing.Evaluation(classes, error, weights, "float32")
    assert not found.same
    assert found.comparable is (precision == "float32")
    assert found.holds is (precision == "tf32" and holds)
    assert found.close is holds


def test_a_run_that_predicts_otherwise_is_not_published(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = records.load(published / "records" / "tiny" / "0.json")
    network = econv.from_pretrained(published / "weights" / "tiny")
    with torch.no_grad():
        network.classifier.weight.neg_()
    monkeypatch.setattr(publishing, "_rounded", lambda *_: network)
    arguments = (published / "out" / "tiny" / "0", tiny_training.stripes(), published / "records")
    with pytest.raises(train.CheckpointError, match=r"the record's test error of .* these"):
        train.publish(record, *arguments, tmp_path, "cpu", progress=False)

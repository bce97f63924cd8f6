"""Test images at every angle, seen in a disc or whole."""

import dataclasses

import pytest
import torch

from econv import records
from econv.recipes import RECIPES
from econv.records import RecordError
from econv.report import Row, as_text, rows
from econv.weights import inscribed_disc
from tiny_training import TINY, start, stripes, trainer

TURNED = dataclasses.replace(TINY, test_angles=8, disc=True, augmentation=())


def test_a_record_has_the_error_at_every_angle(tmp_path):
    record = start(tmp_path, TURNED)
    assert record.angle_errors is not None
    assert len(record.angle_errors) == 8
    assert record.test_error == pytest.approx(sum(record.angle_errors) / 8)
    # p4 itself: quarter turns change nothing.
    assert record.angle_errors[0::2] == [record.angle_errors[0]] * 4
    assert records.load(records.path_of(tmp_path / "records", TURNED.name, 0)) == record
    for errors in ([*record.angle_errors[:-1], 101.0], record.angle_errors[:-1], [1.0] * 8):
        with pytest.raises(RecordError, match=r"angle_errors|as the mean"):
            dataclasses.replace(record, angle_errors=[*errors], test_error=50.0)


def test_settings_of_older_records_are_those_of_their_recipes():
    assert not {"test_angles", "disc"} & set(RECIPES["mnist_rot_p8"].settings())
    assert RECIPES["cifar10_upright_p8"].settings()["disc"] is True


def test_images_turn_before_the_network_sees_them():
    found = trainer(TURNED)
    x = stripes().test.x[:4]
    assert torch.equal(found.images(x, degrees=90.0), found.images(torch.rot90(x, 1, (2, 3))))
    eighth = found.images(x, degrees=45.0)
    assert (found.images(x) - eighth).abs().max() > 0.1
    corners = torch.ones(12, 12, dtype=torch.bool) & (inscribed_disc(12, 12) == 0)
    assert corners.sum() >= 12
    assert eighth[..., corners].abs().max() == 0
    whole = trainer(dataclasses.replace(TURNED, disc=False))
    assert whole.images(x)[..., corners].abs().max() > 0


def test_tables_name_the_worst_angle(tmp_path):
    recipe = dataclasses.replace(TURNED, table=4, minimum_seeds=1)
    record = start(tmp_path, recipe)
    assert record.angle_errors is not None
    worst = max(record.angle_errors)
    (row,) = rows([record], {recipe.name: recipe})
    assert f"worst {worst:.2f} at" in row.error
    assert f"upright {record.angle_errors[0]:.2f}, 45° {record.angle_errors[1]:.2f}" in row.error
    assert "every angle" in as_text([row])
    assert (
        "worst" not in Row(recipe, (dataclasses.replace(record, angle_errors=None),), False).error
    )


@pytest.mark.parametrize("name", [name for name in RECIPES if "upright" in name])
def test_networks_of_upright_mnist_are_small(name):
    from econv import create_model

    recipe = RECIPES[name]
    parameters = sum(
        p.numel() for p in create_model(recipe.model, **dict(recipe.model_options)).parameters()
    )
    assert parameters <= (200_000 if recipe.dataset == "mnist" else 600_000)
    assert not dict(recipe.augmentation).get("rotate")
    assert not recipe.retrain_on_all

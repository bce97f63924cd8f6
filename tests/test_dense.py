"""Networks with an answer for every pixel, over any of our ResNets."""

import json

import pytest
import torch

import econv
from econv import create_model, from_pretrained
from econv.models import FPN, EncoderUNet
from econv.testing import assert_equivariant

THIN = {"cifar_resnet8": (1, 2, 2), "resnet18": (1, 1, 2, 2), "resnet10_3d": (1, 1, 1, 1)}


def network(name: str, **options: object) -> torch.nn.Module:
    """With few fields, in float64, whose norms have seen something."""
    torch.manual_seed(0)
    encoder = name.partition("_")[2].rpartition("_")[0]
    given = {"encoder_options": {"fields": THIN[encoder]}, "in_channels": 1, "classes": 2}
    made = create_model(name, **{**given, **options}).double()
    sides = [33] * 3 if "3d" in name else [137 if "18" in name else 24] * 2
    with torch.no_grad():
        made(torch.randn(1, 1, *sides, dtype=torch.float64))
    return made.eval()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("unet_cifar_resnet8_p4m", ((21, 21), (22, 22))),
        ("fpn_cifar_resnet8_p8", ((20, 20), (19, 19))),
        pytest.param(
            "unet_cifar_resnet8_p8m", ((19, 19), (20, 20), (23, 23)), marks=pytest.mark.slow
        ),
        pytest.param("unet_resnet18_p4", ((130, 130), (131, 131)), marks=pytest.mark.slow),
        pytest.param("fpn_resnet18_p4", ((130, 130), (133, 133)), marks=pytest.mark.slow),
        pytest.param("unet_resnet10_3d_T", ((33,) * 3, (34,) * 3), marks=pytest.mark.slow),
        pytest.param("fpn_resnet10_3d_T", ((33,) * 3, (34,) * 3), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("output", ["scalar", "regular", "vector"])
def test_answers_turn_with_the_image_on_every_size(
    name: str, sizes: tuple[tuple[int, ...], ...], output: str
) -> None:
    made = network(name, output=output)
    group = made.group
    elements = group.generators if "3d" in name else group.grid_symmetries
    for size in sizes:
        image = torch.randn(1, 1, *size, dtype=torch.float64)
        channels = {"scalar": 2, "regular": 2 * group.order, "vector": 2 * made.dimension}[output]
        with torch.no_grad():
            assert made(image).shape == (1, channels, *size)
            assert_equivariant(made, image, elements=elements, output_kind=output)


def test_an_encoder_that_is_not_exact_is_noticed() -> None:
    made = network("unet_cifar_resnet8_p4", encoder_options={"fields": (1, 2, 2), "exact": False})
    image = torch.randn(1, 1, 20, 20, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not equivariant"):
        assert_equivariant(made, image, elements=(1,))


@pytest.mark.parametrize("name", ["unet_cifar_resnet8_p4", "fpn_cifar_resnet8_p4"])
def test_every_parameter_learns(name: str) -> None:
    made = network(name).float().train()
    made(torch.randn(2, 1, 21, 24)).square().mean().backward()
    assert [n for n, p in made.named_parameters() if p.grad is None or not p.grad.any()] == []
    with pytest.raises(ValueError, match="the encoder's maps are all needed"):
        made.set_grad_checkpointing()


def test_ordinary_twins_have_no_layers_of_ours() -> None:
    for name in ("unet_cifar_resnet8", "fpn_cifar_resnet8"):
        ours = create_model(f"{name}_p4", num_classes=3)
        twin = create_model(name, num_classes=3)
        assert twin.group is None
        assert not any("Group" in type(m).__name__ for m in twin.modules())
        counts = [sum(p.numel() for p in m.parameters()) for m in (ours, twin)]
        assert 1 / 3 < counts[0] / counts[1] < 3
        assert twin(torch.randn(1, 3, 17, 18)).shape == (1, 3, 17, 18)


@pytest.mark.parametrize("name", ["unet_cifar_resnet8_p4", "fpn_cifar_resnet8_p4"])
@pytest.mark.parametrize("output", ["scalar", "vector"])
def test_they_are_saved_and_made_again(name: str, output: str, tmp_path) -> None:
    pytest.importorskip("safetensors")
    made = network(name, output=output).float()
    made.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    image = torch.randn(1, 1, 20, 21)
    assert type(again) is type(made)
    torch.testing.assert_close(again(image), made(image), rtol=0, atol=0)
    with pytest.warns(UserWarning, match="has 2 classes"):
        assert from_pretrained(tmp_path, num_classes=5)(image).shape[1] in (5, 10)


@pytest.mark.parametrize("name", ["unet_cifar_resnet8_p4", "fpn_cifar_resnet8_p4"])
def test_they_are_exported_for_images_of_every_size(name: str) -> None:
    made = network(name)
    plain = econv.export(made)
    for size in ((20, 20), (19, 22)):
        image = torch.randn(1, 1, *size, dtype=torch.float64)
        torch.testing.assert_close(plain(image), made(image))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_torch_runs_on_other_sizes() -> None:
    made = create_model("unet_p4", fields=(1, 1)).eval()
    traced = torch.jit.trace(made, torch.randn(1, 1, 13, 14))
    image = torch.randn(2, 1, 16, 11)
    torch.testing.assert_close(traced(image), made(image))


def test_names_find_their_encoder() -> None:
    found = create_model("unet_resnet26_p8", classes=2, encoder_options={"fields": (1, 1, 1)})
    assert isinstance(found, EncoderUNet)
    assert found.encoder.config["depth"] == 26
    assert isinstance(create_model("fpn_resnet20_p4", num_classes=7), FPN)
    wide = create_model("unet_wrn10_1_p4m", encoder_options={"fields": (1, 1, 1)})
    assert wide(torch.randn(1, 3, 20, 21)).shape == (1, 2, 20, 21)
    assert create_model("fpn_resnet20_p4", num_classes=0).get_classifier() is not None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("unet_resnet27_p4", {}, "expected a depth of 6n"),
        ("unet_cifar_resnet8_p4", {"output": "tensor"}, "expected output as one of"),
        ("unet_cifar_resnet8", {"output": "vector"}, "expected a group for the output 'vector'"),
        ("unet_cifar_resnet8_p4", {"fields": (1,)}, "expected the fields of 2 levels"),
        ("fpn_cifar_resnet8_p4", {"fields": (1, 2)}, "expected the fields of all levels as one"),
        ("unet_p4", {"output": "scalars"}, "expected output as one of"),
        ("unet_p4", {"classes": 3, "num_classes": 4}, "expected num_classes or classes"),
        ("unet_cifar_resnet8_p4", {"encoder_options": 5}, "expected encoder_options as a mapping"),
        (
            "fpn_cifar_resnet8_p4",
            {"encoder_options": {"num_classes": 3}},
            "without in_channels and num_classes, .*; got {'num_classes': 3}",
        ),
        ("fpn_wrn10_1_p4_p2_p1", {}, "expected a network of one group for its maps"),
    ],
)
def test_what_does_not_fit_is_named(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_model(name, **options)
    with pytest.raises(ValueError, match="expected the name of a ResNet as encoder"):
        EncoderUNet("convnet6_p4")


@pytest.mark.parametrize("output", ["regular", "vector"])
def test_the_plain_u_net_has_fields_and_vectors_too(output: str) -> None:
    torch.manual_seed(0)
    made = create_model("unet_p4m", fields=(1, 2), output=output, num_classes=2).double().eval()
    for size in (12, 13):
        image = torch.randn(1, 1, size, size, dtype=torch.float64)
        elements = econv.Group("p4m").grid_symmetries
        assert_equivariant(made, image, elements=elements, output_kind=output)


@pytest.mark.parametrize(
    "arguments",
    [
        {"encoder": "cifar_resnet8_p20000"},
        {"encoder": "wrn10_1_p20000_p4_p1"},
        {"encoder_options": {"restrict": ["p20000", "p2"]}},
    ],
)
def test_files_may_not_ask_for_groups_without_bounds(arguments, tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    network("unet_cifar_resnet8_p4").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    state = safetensors.load_file(tmp_path / "model.safetensors")
    safetensors.save_file(state, tmp_path / "model.safetensors")  # as others write it
    assert from_pretrained(tmp_path).group.name == "p4"
    config["arguments"].update(arguments)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"expected group of order 360 at most; got 'p20000'"):
        from_pretrained(tmp_path)

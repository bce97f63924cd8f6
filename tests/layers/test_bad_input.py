"""Bad input: each a ValueError that says what was expected and what came."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from econv import (
    Central,
    CentredAvgPool2d,
    CentredMaxPool2d,
    Curl2d,
    Downsample2d,
    FieldParameter,
    Group,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupGroupNorm2d,
    GroupInstanceNorm2d,
    GroupLayerNorm2d,
    GroupPool2d,
    GroupPReLU2d,
    GroupUpsampleConv2d,
    LiftConv2d,
    Restrict2d,
    Spread2d,
    Upsample2d,
    VectorConv2d,
    restrict,
)
from econv.layers.attention import GroupAttentionPool2d, GroupFrameScore2d

FEW = settings(max_examples=25, deadline=None)
GROUPS = st.sampled_from(["p1", "p2", "p3", "p4", "p6", "p8", "p1m", "p3m", "p4m"])
# Things that are no count: zero, negative, fractions, truth values, text, nothing.
NO_COUNTS = st.one_of(
    st.integers(max_value=0),
    st.floats(allow_nan=True),
    st.booleans(),
    st.text(max_size=5),
    st.none(),
    st.just([2]),
)
CONVOLUTIONS = {"lift": LiftConv2d, "group": GroupConv2d, "vector": VectorConv2d}
CONVOLUTION = st.sampled_from(list(CONVOLUTIONS.values()))


def rejected(expected, got, function, *arguments, **keywords):
    """Assert that a call raises a ValueError that names both what was expected and what came."""
    with pytest.raises(ValueError, match="expected") as caught:
        function(*arguments, **keywords)
    message = str(caught.value)
    for part in (expected, got):
        assert part in message, f"{part!r} is not in {message!r}"


def test_rejected_itself_can_say_no():
    def silent():
        pass

    def vague():
        raise ValueError("expected something else")

    def wrong_kind():
        raise TypeError("expected 3; got 4")

    with pytest.raises(pytest.fail.Exception):
        rejected("3", "4", silent)
    with pytest.raises(AssertionError):
        rejected("3", "4", vague)
    with pytest.raises(TypeError):
        rejected("3", "4", wrong_kind)


def by_group(group):
    """Every layer that reads two fields of a group, by name."""
    return {
        "GroupConv2d": GroupConv2d(2, 1, group, operators="order<=1"),
        "VectorConv2d": VectorConv2d(2, 1, group, operators="order<=1"),
        "GroupUpsampleConv2d": GroupUpsampleConv2d(2, 1, group, operators="order<=1"),
        "GroupBatchNorm2d": GroupBatchNorm2d(2, group),
        "GroupInstanceNorm2d": GroupInstanceNorm2d(2, group),
        "GroupGroupNorm2d": GroupGroupNorm2d(1, 2, group),
        "GroupLayerNorm2d": GroupLayerNorm2d(2, group),
        "GroupPReLU2d": GroupPReLU2d(2, group),
    }


def of_any_fields(group):
    """Every layer that reads any number of fields of a group."""
    return {
        "GroupPool2d": GroupPool2d(group),
        "GroupDropout2d": GroupDropout2d(group),
        "Restrict2d": Restrict2d(group, "p1"),
    }


def every_layer():
    return {
        "LiftConv2d": LiftConv2d(8, 1, "p4"),
        **by_group("p4"),
        **of_any_fields("p4"),
        "CentredAvgPool2d": CentredAvgPool2d(2),
        "CentredMaxPool2d": CentredMaxPool2d(2),
        "Downsample2d": Downsample2d(),
        "Upsample2d": Upsample2d(),
    }


# Tensors


@given(group=GROUPS, channels=st.integers(1, 40))
@FEW
def test_the_wrong_number_of_group_channels(group, channels):
    wanted = 2 * Group(group).order
    if channels == wanted:
        channels += 1
    x = torch.randn(2, channels, 6, 7)
    for layer in by_group(group).values():
        rejected(f"{wanted} channels (2 fields of {group})", f"got {channels} channels", layer, x)


@given(wanted=st.integers(1, 6), channels=st.integers(1, 12))
@FEW
def test_the_wrong_number_of_image_channels(wanted, channels):
    if channels == wanted:
        channels += 1
    layer = LiftConv2d(wanted, 1, "p4")
    x = torch.randn(1, channels, 6, 6)
    rejected(f"{wanted} image channels", f"got {channels} channels", layer, x)


@given(group=GROUPS.filter(lambda g: g != "p1"), fields=st.integers(0, 3), rest=st.integers(1, 99))
@FEW
def test_channels_that_are_no_multiple_of_the_order(group, fields, rest):
    order = Group(group).order
    channels = fields * order + 1 + rest % (order - 1)
    x = torch.randn(1, channels, 5, 5)
    for layer in of_any_fields(group).values():
        rejected(f"multiples of {order}, the order of {group}", f"got {channels}", layer, x)
    rejected(f"multiples of {order}", f"got {channels}", restrict, x, group, "p1")


@pytest.mark.parametrize("name", every_layer())
@given(shape=st.lists(st.integers(1, 4), max_size=6).filter(lambda shape: len(shape) != 4))
@settings(max_examples=10, deadline=None)
def test_the_wrong_rank(name, shape):
    if name == "GroupPool2d" and len(shape) == 2:
        shape = [*shape, 3]
    layer, x = every_layer()[name], torch.zeros(shape)
    rejected("[batch, channels, height, width]", f"got {len(shape)} dimensions", layer, x)


@pytest.mark.parametrize("name", every_layer())
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64]
)
def test_a_dtype_without_a_point(name, dtype):
    x = torch.zeros(1, 8, 6, 6, dtype=dtype)
    rejected("floating-point", f"got {dtype}", every_layer()[name], x)


@pytest.mark.parametrize("name", every_layer())
@pytest.mark.parametrize("what", [None, [[1.0]], 3.0, "image"])
def test_things_that_are_no_tensors(name, what):
    rejected("a torch.Tensor", f"got {type(what).__name__}", every_layer()[name], what)


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@given(wanted=st.sampled_from(FLOATS), given_dtype=st.sampled_from(FLOATS))
@settings(max_examples=16, deadline=None)
def test_the_dtype_of_another_layer(kind, wanted, given_dtype):
    layer = CONVOLUTIONS[kind](4, 1, "p1", operators="order<=1", dtype=wanted)
    x = torch.zeros(1, 4, 5, 5, dtype=given_dtype)
    if wanted == given_dtype:
        assert layer(x).dtype == wanted
    else:
        rejected(f"expected {wanted}", f"got {given_dtype}", layer, x)


@pytest.mark.parametrize(
    "layer",
    [
        GroupBatchNorm2d(2, "p4"),
        GroupInstanceNorm2d(2, "p4", affine=True),
        GroupLayerNorm2d(2, "p4"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_norms_name_the_dtype_they_expect(layer):
    x = torch.zeros(2, 8, 5, 5, dtype=torch.float64)
    rejected("torch.float32", "torch.float64", layer, x)


@given(
    kind=CONVOLUTION,
    group=st.sampled_from(["p4", "p8"]),
    dilation=st.integers(1, 2),
    height=st.integers(1, 12),
    width=st.integers(1, 12),
)
@FEW
def test_an_image_smaller_than_the_stencil(kind, group, dilation, height, width):
    layer = kind(1, 1, group, dilation=dilation)
    extent = dilation * (layer.basis.size - 1) + 1
    x = torch.zeros(1, layer.in_channels, height, width)
    if min(height, width) >= extent:
        assert layer(x).shape[2:] == (height, width)
    else:
        rejected(f"at least {extent}×{extent} pixels", f"got {height}×{width}", layer, x)


@given(
    mode=st.sampled_from(["zeros", "replicate", "circular", "reflect"]),
    padding=st.integers(0, 12),
    side=st.integers(5, 9),
)
@FEW
def test_padding_wider_than_the_image(mode, padding, side):
    layer = LiftConv2d(1, 1, "p4", padding=padding, padding_mode=mode)
    x = torch.zeros(1, 1, side, side + 3)
    most = {"zeros": math.inf, "replicate": math.inf, "circular": side, "reflect": side - 1}[mode]
    if padding <= most:
        grown = 2 * padding + 1 - layer.basis.size
        assert layer(x).shape[2:] == (side + grown, side + 3 + grown)
    else:
        expected = f"larger than the padding of {padding}"
        rejected(expected, f"got {side}×{side + 3}", layer, x)


@given(side=st.integers(1, 9), asked=st.integers(-2, 30))
@FEW
def test_upsampling_to_a_size_that_does_not_halve_to_this_one(side, asked):
    x = torch.zeros(1, 1, side, side)
    for size in (asked, (asked, 2 * side), (2 * side, asked)):
        if asked in (2 * side, 2 * side - 1):
            assert Upsample2d()(x, size).shape[-1] in (2 * side, 2 * side - 1)
        else:
            rejected(f"twice ({side}, {side})", f"got {size}", Upsample2d(), x, size)
    rejected("twice", "got (4, 4, 4)", Upsample2d(), x, (4, 4, 4))


@pytest.mark.parametrize("size", [7.0, "78", (7.5, 8)])
def test_upsampling_to_a_size_that_is_no_number(size):
    rejected("twice (4, 4)", f"got {size!r}", Upsample2d(), torch.zeros(1, 1, 4, 4), size)


# Arguments


SOLIDS = re.compile(r"[CD]\d+[vhd]?|T[dh]?|Oh?|Ih?")
NAMES = st.text(max_size=8).filter(
    lambda name: (
        not (name[:1] == "p" and name[1:].rstrip("m").isdigit()) and not SOLIDS.fullmatch(name)
    )
)


@given(
    name=st.one_of(NAMES, st.sampled_from(["p0", "p04", "p4M", "P4", "p4mm", "p-1", "pm", "c4"]))
)
@FEW
def test_unknown_groups(name):
    expected, got = "'pn' (n rotations) or 'pnm'", repr(name)
    for build in (
        Group,
        GroupPool2d,
        GroupDropout2d,
        lambda name: LiftConv2d(1, 1, name),
        lambda name: GroupConv2d(1, 1, name),
        lambda name: VectorConv2d(1, 1, name),
        lambda name: GroupBatchNorm2d(1, name),
        lambda name: GroupInstanceNorm2d(1, name),
        lambda name: GroupLayerNorm2d(1, name),
        lambda name: Restrict2d(name, "p1"),
        lambda name: Restrict2d("p4", name),
    ):
        rejected(expected, got, build, name)


@pytest.mark.parametrize("group", [None, 4, 4.0, ["p4"], b"p4"])
def test_groups_that_are_no_names(group):
    rejected("'pn' (n rotations) or 'pnm'", repr(group), LiftConv2d, 1, 1, group)


@pytest.mark.parametrize(
    ("keywords", "expected", "got"),
    [
        ({"stencils": "round"}, "'central'", "'round'"),
        ({"stencils": ""}, "'central'", "''"),
        ({"stencils": None}, "'central'", "None"),
        ({"stencils": 2}, "'central'", "2"),
        ({"operators": "papers"}, "'paper', 'order<=N'", "'papers'"),
        ({"operators": "order<=-1"}, "'paper', 'order<=N'", "'order<=-1'"),
        ({"operators": "order<=1.5"}, "'paper', 'order<=N'", "'order<=1.5'"),
        ({"operators": "order<3"}, "'paper', 'order<=N'", "'order<3'"),
        ({"operators": 3}, "'paper', 'order<=N'", "3"),
        ({"operators": [(1, -1)]}, "non-negative", "(1, -1)"),
        ({"operators": [(1, 0), (1,)]}, "all of one length", "(1,)"),
        ({"operators": [(1, 0), (1, 0)]}, "each monomial once", "((1, 0), (1, 0))"),
        ({"operators": [(0.5, 0)]}, "whole numbers", "(0.5, 0)"),
        ({"operators": [(0, 0, 1)]}, "2 dimensions", "has 3"),
        ({"engine": "fast"}, "'auto', 'dense', 'spectral' or one of ['dense'", "'fast'"),
        ({"engine": None}, "'auto', 'dense', 'spectral' or one of ['dense'", "None"),
        ({"padding_mode": "mirror"}, "'zeros', 'reflect', 'replicate', 'circular'", "'mirror'"),
        ({"padding_mode": None}, "'zeros', 'reflect', 'replicate', 'circular'", "None"),
        ({"padding_mode": ("zeros", "mirror")}, "a pair of them for (y, x)", "'mirror'"),
        ({"padding_mode": ("zeros",)}, "a pair of them for (y, x)", "('zeros',)"),
        ({"padding_mode": ("zeros", ["circular"])}, "a pair of them for (y, x)", "circular"),
        ({"padding": "full"}, "'same', 'valid' or one whole number", "'full'"),
        ({"padding": -1}, "'same', 'valid' or one whole number", "-1"),
        ({"padding": 1.5}, "'same', 'valid' or one whole number", "1.5"),
        ({"padding": (1, 2)}, "'same', 'valid' or one whole number", "(1, 2)"),
        ({"padding": True}, "'same', 'valid' or one whole number", "True"),
        ({"init": "xavier"}, "'relu', 'silu', 'gelu', 'softplus', 'paper'", "'xavier'"),
        ({"init": None}, "'relu', 'silu', 'gelu', 'softplus', 'paper'", "None"),
        ({"stride": (2, 2)}, "stride as a whole number of at least 1", "(2, 2)"),
        ({"dilation": (1, 2)}, "dilation as a whole number of at least 1", "(1, 2)"),
        ({"spacing": 0.0}, "positive spacing", "0.0"),
        ({"spacing": -1}, "positive spacing", "-1"),
        ({"spacing": math.inf}, "positive spacing", "inf"),
        ({"spacing": math.nan}, "positive spacing", "nan"),
        ({"spacing": None}, "positive spacing", "None"),
        ({"spacing": "fine"}, "positive spacing", "'fine'"),
        ({"spacing": (1.0, 0.0)}, "a pair of them for (y, x)", "(1.0, 0.0)"),
        ({"spacing": (1.0,)}, "a pair of them for (y, x)", "(1.0,)"),
        ({"spacing": (1.0, 2.0, 3.0)}, "a pair of them for (y, x)", "(1.0, 2.0, 3.0)"),
        ({"spacing": (1.0, True)}, "a pair of them for (y, x)", "(1.0, True)"),
        ({"dtype": torch.int32}, "floating-point dtype", "torch.int32"),
        ({"dtype": torch.complex64}, "floating-point dtype", "torch.complex64"),
        ({"device": "float32"}, "device as 'cpu' or 'cuda:0' are", "'float32'"),
        ({"device": -1}, "device as 'cpu' or 'cuda:0' are", "-1"),
        ({"device": [1]}, "device as 'cpu' or 'cuda:0' are", "[1]"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_keywords_of_convolutions(kind, keywords, expected, got):
    rejected(expected, got, CONVOLUTIONS[kind], 2, 1, "p4", **keywords)


def test_operators_may_be_an_array():
    """An array is a list of exponent tuples too, and must not be compared with a name."""
    exponents = torch.tensor([[0, 0], [1, 0]]).numpy()
    layer = LiftConv2d(1, 1, "p4", operators=exponents)
    assert layer.basis.operators.monomials == ((0, 0), (1, 0))


@given(kind=CONVOLUTION, group=st.sampled_from(["p4", "p6", "p8"]), size=st.integers(-3, 12))
@FEW
def test_sizes_that_hold_no_stencil(kind, group, size):
    smallest = kind(1, 1, group).basis.size
    if size % 2 and size >= smallest:
        assert kind(1, 1, group, size=size).basis.size == size
    else:
        rejected(f"odd size of at least {smallest}", f"got {size}", kind, 1, 1, group, size=size)


@pytest.mark.parametrize("size", [5.0, "5", (5, 5), [5], {}])
def test_sizes_that_are_no_numbers(size):
    GroupConv2d(1, 1, "p4", size=5)  # what was built before must not decide what is accepted
    rejected("an odd size of at least", repr(size), GroupConv2d, 1, 1, "p4", size=size)


@given(accuracy=st.one_of(st.integers(-4, 9), st.floats(), st.text(max_size=3), st.none()))
@FEW
def test_accuracies_that_central_differences_do_not_have(accuracy):
    if isinstance(accuracy, int) and accuracy >= 2 and accuracy % 2 == 0:
        assert Central(accuracy).accuracy == accuracy
    else:
        options = {"stencils": "central", "accuracy": accuracy}
        rejected("an even accuracy", repr(accuracy), LiftConv2d, 1, 1, "p4", **options)


@given(bad=NO_COUNTS)
@FEW
def test_counts_that_are_no_counts(bad):
    expected, got = "as a whole number of at least 1", f"got {bad!r}"
    rejected(f"in_channels {expected}", got, LiftConv2d, bad, 1, "p4")
    rejected(f"out_fields {expected}", got, LiftConv2d, 1, bad, "p4")
    rejected(f"in_fields {expected}", got, GroupConv2d, bad, 1, "p4")
    rejected(f"out_fields {expected}", got, GroupConv2d, 1, bad, "p4")
    rejected(f"out_vectors {expected}", got, VectorConv2d, 1, bad, "p4")
    for norm in (GroupBatchNorm2d, GroupInstanceNorm2d, GroupLayerNorm2d):
        rejected(f"fields {expected}", got, norm, bad, "p4")
    for kind in CONVOLUTIONS.values():
        for name in ("stride", "dilation", "groups"):
            rejected(f"{name} {expected}", got, kind, 2, 1, "p4", **{name: bad})


@given(bad=NO_COUNTS)
@FEW
def test_fields_of_a_vector_convolution_that_are_no_count(bad):
    got = f"got {bad!r}"
    rejected("in_fields as a whole number of at least 1", got, VectorConv2d, bad, 1, "p4")


@given(groups=st.integers(1, 7), ins=st.integers(1, 12), outs=st.integers(1, 12))
@FEW
def test_groups_that_do_not_divide(groups, ins, outs):
    names = {
        LiftConv2d: ("in_channels", "out_fields"),
        GroupConv2d: ("in_fields", "out_fields"),
        VectorConv2d: ("in_fields", "out_vectors"),
    }
    for kind, (first, second) in names.items():
        if ins % groups == outs % groups == 0:
            assert kind(ins, outs, "p2", groups=groups).groups == groups
            continue
        name, count = (first, ins) if ins % groups else (second, outs)
        expected = f"{name} divisible by groups={groups}"
        rejected(expected, f"got {count}", kind, ins, outs, "p2", groups=groups)


@given(channels=st.integers(1, 6), vectors=st.integers(-2, 6))
@FEW
def test_more_vectors_than_channels(channels, vectors):
    if 0 <= 2 * vectors <= channels:
        assert LiftConv2d(channels, 1, "p4", vectors=vectors).vectors == vectors
    else:
        expected = f"vectors between 0 and in_channels / 2 = {channels // 2}"
        rejected(expected, f"got {vectors}", LiftConv2d, channels, 1, "p4", vectors=vectors)


def test_vectors_do_not_go_with_groups_nor_biases_with_vectors():
    rejected("groups=1", "got groups=2", LiftConv2d, 4, 2, "p4", vectors=1, groups=2)
    rejected("bias=False", "a constant vector", VectorConv2d, 1, 1, "p4", bias=True)


@given(
    kind=CONVOLUTION,
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=5).map(tuple),
)
@FEW
def test_coefficients_of_the_wrong_shape(kind, shape):
    layer = kind(2, 3, "p4", operators="order<=1")
    wanted = tuple(layer.coefficients().shape)
    if shape == wanted:
        shape = (*shape, 1)
    given_coefficients = torch.zeros(shape)
    before = layer.weight.detach().clone()
    rejected(f"shape {wanted}", f"got {shape}", layer.set_coefficients, given_coefficients)
    assert torch.equal(before, layer.weight)


@given(reduce=st.one_of(st.text(max_size=6), st.none(), st.integers()))
@FEW
def test_unknown_reductions(reduce):
    if reduce not in ("max", "mean", "std", *(f"top{n}" for n in range(1, 5))):
        rejected("expected reduce", f"got {reduce!r}", GroupPool2d, "p4", reduce)
    if reduce not in ("max", "mean"):
        rejected("'mean' or 'max'", f"got {reduce!r}", Downsample2d, reduce)


@pytest.mark.parametrize(
    "reduce", ["max+max", "top5", "top0", "mean+", "max,mean", "top٣", "max+sum"]
)
def test_reductions_that_are_no_statistics_of_four_orientations(reduce):
    rejected("expected reduce", f"got {reduce!r}", GroupPool2d, "p4", reduce)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, math.inf, None, "half"])
def test_probabilities_that_are_none(p):
    rejected("a probability p between 0 and 1", f"got {p!r}", GroupDropout2d, "p4", p)


@pytest.mark.parametrize(
    ("group", "subgroup"),
    [("p8", "p3"), ("p8", "p16"), ("p8", "p4m"), ("p8m", "p16m"), ("p6m", "p4"), ("p1", "p1m")],
)
def test_subgroups_that_are_none(group, subgroup):
    for build in (Restrict2d, lambda *names: restrict(torch.zeros(1, 48, 4, 4), *names)):
        with pytest.raises(ValueError, match=f"{subgroup} is not a subgroup of {group}") as caught:
            build(group, subgroup)
        assert f"divide {Group(group).rotations}" in str(caught.value)


# Centred windows, scales per field


@pytest.mark.parametrize("centred", [None, 2, "yes", (2,), (2, 0, 0), (0, 1), (2, -1), (2.0, 0)])
def test_centred_that_is_neither_a_truth_value_nor_a_pair(centred):
    rejected(
        "centred as True, False or a pair", repr(centred), LiftConv2d, 1, 1, "p4", centred=centred
    )


@pytest.mark.parametrize("pool", [CentredAvgPool2d, CentredMaxPool2d])
def test_windows_that_do_not_fit(pool):
    rejected("kernel_size", "0", pool, 0)
    rejected("stride", "-1", pool, 2, -1)
    rejected("padding as one whole number", "(1, 1)", pool, 2, padding=(1, 1))
    rejected("at most half of kernel_size=3", "2", pool, 3, padding=2)
    rejected("at least 3 pixels", "2", pool(5, padding=1), torch.randn(1, 1, 2, 9))
    rejected("at least 2 pixels", "1", pool(2, padding=1), torch.randn(1, 1, 1, 9))
    assert pool(2, padding=1)(torch.randn(1, 1, 2, 9)).shape[2:] == (2, 5)


@pytest.mark.parametrize(
    "layer",
    [FieldParameter, GroupAttentionPool2d, GroupBatchNorm2d, GroupFrameScore2d, GroupPReLU2d],
)
def test_devices_that_are_none(layer):
    rejected("device as 'cpu' or 'cuda:0' are", "-1", layer, 3, "p4", device=-1)
    assert layer(3, "p4", device="meta", dtype=torch.float64).weight.is_meta


def test_counts_of_fields_and_blocks():
    rejected("divisible by groups=3", "4", GroupGroupNorm2d, 3, 4, "p4")
    rejected("fields", "0", GroupGroupNorm2d, 1, 0, "p4")
    rejected("fields", "0", GroupPReLU2d, 0, "p4")
    rejected("fields", "1.5", FieldParameter, 1.5, "p4")
    rejected("factor", "0", GroupUpsampleConv2d, 1, 1, "p4", factor=0)
    rejected("excess", "0.5", GroupUpsampleConv2d, 1, 1, "p4", excess=0.5)


def test_one_pixel_has_no_other_to_be_reflected_in():
    x = torch.randn(1, 1, 1, 5)
    rejected("at least 2×2 pixels", "(1, 1, 1, 5)", Curl2d(padding_mode="reflect"), x)
    rejected("at least 2×1", "'reflect'", Curl2d(padding_mode=("reflect", "zeros")), x)
    assert Curl2d(padding_mode=("zeros", "reflect"))(x).shape == (1, 2, 1, 5)


def test_what_cannot_be_spread():
    rejected(
        "[batch, channels, height, width]", "3 dimensions", Spread2d("p4"), torch.randn(2, 3, 4)
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: LiftConv2d(3, 4, "p4", **o),
        lambda **o: GroupConv2d(3, 4, "p4", **o),
        lambda **o: VectorConv2d(3, 1, "p4", **o),
        lambda **o: GroupUpsampleConv2d(3, 1, "p4", **o),
    ],
)
def test_kernel_size_names_size(make):
    with pytest.raises(TypeError, match=r"no argument 'kernel_size': size is the side of the"):
        make(kernel_size=5)
    with pytest.raises(TypeError, match=r"Conv2d takes no argument 'strides'$"):
        make(strides=2)

